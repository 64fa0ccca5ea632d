//! The Python module: converts, decides nothing.
