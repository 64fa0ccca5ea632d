//! Stable device addresses: ranges, physical pages under a byte limit, and aliasing.
