"""Attention layers as operators: QK and OV circuits in homogeneous coordinates, frozen attention patterns, gauges."""
