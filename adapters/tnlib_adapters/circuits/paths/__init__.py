"""Paths through attention layers and their contributions to outputs and losses."""
