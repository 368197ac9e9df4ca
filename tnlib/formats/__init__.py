"""The formats: frozen dataclasses of arrays with their invariants; algorithms live above and below."""
