"""The commands besides launching: one module each, read by click; cli/parser.py lists them."""
