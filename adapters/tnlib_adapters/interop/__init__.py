"""States and operators of other libraries: from_X and to_X for their objects, read and write for their files.

One module per library, and no library is imported before it is used.
"""
