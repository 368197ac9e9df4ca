"""TT-cross: interpolation of a function of indices by a tensor train."""
