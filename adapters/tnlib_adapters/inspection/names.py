"""Names that the command line needs before it imports numpy."""

PAGE = "inspect.html"
