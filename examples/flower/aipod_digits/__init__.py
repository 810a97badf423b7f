"""The paper's hyper-representation task as a Flower app."""
