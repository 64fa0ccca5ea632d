//! Page-locked host memory and the transfers that read it.
