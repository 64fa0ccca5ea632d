//! The seeded numbers behind [`CopyOrder::Random`](super::CopyOrder::Random): splitmix64, small and repeatable.

/// A sequence of numbers fixed by its seed.
#[derive(Debug, Clone)]
pub(super) struct Rng(u64);

impl Rng {
    /// The sequence of `seed` for the part of the emulator named `salt`.
    pub(super) const fn new(seed: u64, salt: u64) -> Self {
        Self(seed ^ salt.wrapping_mul(0xA24B_AED4_963E_E407))
    }

    /// The next number.
    pub(super) const fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    /// A number below `bound`; zero if `bound` is zero.
    pub(super) const fn below(&mut self, bound: u64) -> u64 {
        if bound == 0 { 0 } else { self.next() % bound }
    }

    /// Yes or no.
    pub(super) const fn coin(&mut self) -> bool {
        self.next() >> 63 == 1
    }

    /// Puts `items` into a random order.
    pub(super) fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            let other = self.below(last as u64 + 1) as usize;
            items.swap(last, other);
        }
    }
}
