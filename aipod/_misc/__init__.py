"""Small tools that every room uses: pytrees, keys, files, digests."""
