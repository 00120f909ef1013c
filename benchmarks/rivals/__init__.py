"""HexiScale's and Zorse's planners by the rules of their authors' code, beside our readings of them."""
