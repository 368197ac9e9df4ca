"""Compression by several processes, of this machine or of a Dask cluster.

Workers read shards of the checkpoint, and exchange arrays through files of a folder that all of them see; messages hold
paths, names and settings.
"""
