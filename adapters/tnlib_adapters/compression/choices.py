"""What can be asked for, by name: read by the command line before anything heavy is loaded."""

METHODS = ("heads", "matrix", "ttm", "tucker", "cp")
WHITENED = ("heads", "matrix", "ttm", "tucker")  # those that a text makes see the inputs
BY_TEXT = ("calibrated", *WHITENED)  # with calibrate
LOW_RANK = ("matrix", "calibrated")  # those that factorise every matrix, feed-forward layers too
WHAT = ("attention", "mlp", "all")
LAYOUTS = ("factored", "dense")
STORES = ("float", "int8")

# files of OUT beside those of the checkpoint
REPORT = "tnlib_report.json"
PAGE = "tnlib_report.html"
