"""Names that the command line reads before anything heavy is loaded."""

PAGE = "inspect.html"
