"""Conversion of tensor networks to and from other libraries: from_X and to_X for objects, read and write for files.

One module per library; a library is imported only when its functions are called.
"""
