"""One-line changes of numerically important lines, and the tests that must notice each of them."""
