"""What can be asked for, by name: read by the command line before anything heavy is loaded."""

METHODS = ("heads", "matrix", "ttm", "tucker", "cp")
BY_TEXT = ("heads", "whitened", "matrix", "ttm", "tucker")  # with calibrate
WHAT = ("attention", "mlp", "all")
LAYOUTS = ("factored", "dense")
STORES = ("float", "int8")

# files of OUT beside those of the checkpoint
REPORT = "tnlib_report.json"
PAGE = "tnlib_report.html"
