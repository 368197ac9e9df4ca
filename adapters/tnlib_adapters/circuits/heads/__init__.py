"""Analysis of single attention heads: attention targets, inputs and outputs."""
