"""A trained sentence encoder, compressed, embeds nearly what it did."""
