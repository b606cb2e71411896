"""What `fuse_attention` reads of a graph: constants, masks, and the forms in which models write attention."""
