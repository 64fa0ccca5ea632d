//! Loops in the vector code of the processor at hand: compiled for SSE2, AVX2 and AVX-512 (or NEON), chosen at run time.
//!
//! Results do not depend on it: no operation is contracted or reordered, in whatever vectors it is done. Only what is inlined into
//! [`Loop::run`] is compiled for each, hence the `inline(always)` of all that hot loops call; a closure would not be.

use pulp::{Arch, Simd, WithSimd};

/// A loop and all that it works on. `run` has to be `inline(always)`.
pub(crate) trait Loop {
    /// Does it all.
    fn run(self);
}

/// Runs a loop that was compiled for the widest vectors that there are.
pub(crate) fn widest(run: impl Loop) {
    Arch::new().dispatch(Any(run));
}

struct Any<L>(L);

impl<L: Loop> WithSimd for Any<L> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        self.0.run();
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use pulp::Simd;

    use super::{Any, Loop, widest};

    /// The vectors that a loop may be compiled for.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub(crate) enum Way {
        Chosen,
        Least,
        #[cfg(target_arch = "x86_64")]
        Avx2,
        #[cfg(target_arch = "x86_64")]
        Avx512,
    }

    impl Way {
        pub(crate) const ALL: &[Self] = &[
            Self::Least,
            Self::Chosen,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2,
            #[cfg(target_arch = "x86_64")]
            Self::Avx512,
        ];

        /// Runs a loop this way; false if this processor cannot.
        pub(crate) fn run(self, run: impl Loop) -> bool {
            match self {
                Self::Chosen => widest(run),
                Self::Least => run.run(),
                #[cfg(target_arch = "x86_64")]
                Self::Avx2 => {
                    let Some(simd) = pulp::x86::V3::try_new() else { return false };
                    Simd::vectorize(simd, Any(run));
                }
                #[cfg(target_arch = "x86_64")]
                Self::Avx512 => {
                    let Some(simd) = pulp::x86::V4::try_new() else { return false };
                    Simd::vectorize(simd, Any(run));
                }
            }
            true
        }
    }
}
