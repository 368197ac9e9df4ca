"""Attribution of attention scores to the writers of the residual stream."""
