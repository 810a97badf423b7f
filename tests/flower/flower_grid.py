"""Flower's grid within one process: every message is written to bytes and read again."""

from flwr.app import Context, Error, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity


class InProcessGrid(Grid):
    """Calls the ClientApp of each node where a network would carry the message.

    - `contexts`: by node what its ClientApp gets; one that is removed is out of reach.
    - `before(node, message)`: may raise, as a node that dies does.
    """

    def __init__(self, app, contexts, before=lambda node, message: None):
        self.app, self.contexts, self.before = app, dict(contexts), before
        self.replies, self.bytes = {}, []
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1

    def set_run(self, run):
        raise NotImplementedError

    @property
    def run(self):
        raise NotImplementedError

    def create_message(self, *arguments, **options):
        raise NotImplementedError

    def send_and_receive(self, messages, *, timeout=None):
        raise NotImplementedError

    def get_node_ids(self):
        return list(self.contexts)

    def push_messages(self, messages):
        tickets = []
        for message in messages:
            node = message.metadata.dst_node_id
            arrived, size = through_bytes(message)
            # As the SuperLink does it: the message's own bytes name it.
            ticket = message.object_id
            for one in (message, arrived):
                one.metadata.__dict__["_message_id"] = ticket
            self.bytes.append((message.metadata.message_type, node, size))
            try:
                self.before(node, message)
                reply = self.app(arrived, self.contexts[node])
                reply, size = through_bytes(reply)
                self.bytes.append(("reply", node, size))
            except Exception as error:
                reply = Message(Error(2, f"{type(error).__name__}: {error}"), reply_to=message)
            self.replies[ticket] = reply
            tickets.append(ticket)
        return tickets

    def pull_messages(self, message_ids):
        return [self.replies.pop(ticket) for ticket in message_ids if ticket in self.replies]


def through_bytes(message):
    """The message as it arrives, and how many bytes it was on the way."""
    contents = {name: part.deflate() for name, part in get_all_nested_objects(message).items()}
    size = sum(map(len, contents.values()))
    return inflate_object_from_contents(message.object_id, contents), size


def context(node, *, run=1, node_config=None, run_config=None):
    return Context(run, node, node_config or {}, RecordDict(), run_config or {})
