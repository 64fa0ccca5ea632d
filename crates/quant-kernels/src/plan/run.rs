//! Runs of elements as flat.cuh reads them, and the structs of kernels put together from words.

use super::Job;
use crate::error::Result;
use crate::family::Family;
use crate::launch::{Launch, THREADS, TargetKind};

/// Elements of one launch at most: kernels count them, and those before them in a row or block, in 31 bits.
pub(super) const LONGEST: u64 = 1 << 30;
/// Rounds of a tile, as in flat.cuh.
const ROUNDS: u64 = 4;
/// Blocks of kernels that fill a table first: a few for each place where a large GPU (132 multiprocessors) runs them, so that each fills
/// it for many tiles.
const TABLE_BLOCKS: u64 = 2112;

/// A kernel, and what it writes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Kernel {
    pub(super) family: Family,
    pub(super) name: &'static str,
    pub(super) kind: TargetKind,
}

impl Kernel {
    /// Its launch.
    pub(super) fn launch(self, tiles: u64, argument: Words) -> Launch {
        let most = if self.family == Family::GgmlCodebook { TABLE_BLOCKS } else { u64::from(u32::MAX >> 1) };
        let Self { family, name: kernel, kind } = self;
        Launch { family, kernel, kind, blocks: tiles.min(most) as u32, argument: argument.0 }
    }
}

/// Packed bytes of elements that follow each other.
#[derive(Debug, Clone, Copy)]
pub(super) struct Run {
    /// Where the bytes of element 0 begin.
    pub(super) data: u64,
    /// Bytes from there on that may be read.
    pub(super) bytes: u64,
    /// The first element that is wanted, and the one behind the last.
    pub(super) first: u64,
    pub(super) end: u64,
    /// Where the first one goes.
    pub(super) out: u64,
    /// Elements that begin a byte, or a block: a power of two.
    pub(super) granule: u64,
}

impl Run {
    fn begin(&self) -> u64 {
        self.first - self.first % self.granule.max(16)
    }

    pub(super) fn tiles(&self, kind: TargetKind) -> u64 {
        (self.end - self.begin()).div_ceil(u64::from(THREADS) * ROUNDS * 16 / kind.bytes())
    }

    /// The struct's first words.
    pub(super) fn words(&self, kind: TargetKind) -> Words {
        let mut words = Words(vec![self.data, self.out]);
        words.pair(self.bytes, self.begin());
        words.pair(self.first, self.end);
        words.pair(self.tiles(kind), 0);
        words
    }
}

/// The elements of a job in pieces that a launch can count, and where each goes.
pub(super) fn pieces(job: &Job<'_>) -> impl Iterator<Item = (u64, u64, u64)> + use<> {
    let (first, end, out, size, longest) = (job.first, job.end, job.out, job.kind.bytes(), job.longest);
    (first..end).step_by(longest as usize).map(move |from| {
        let to = end.min(from.saturating_add(longest));
        (from, to, out + (from - first) * size)
    })
}

/// A kernel's struct in pieces of eight bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Words(pub(super) Vec<u64>);

impl Words {
    /// An address, or a number of 64 bits.
    pub(super) fn word(&mut self, word: u64) -> &mut Self {
        self.0.push(word);
        self
    }

    /// Two numbers of 32 bits, which they have.
    pub(super) fn pair(&mut self, low: u64, high: u64) -> &mut Self {
        debug_assert!(low >> 32 == 0 && high >> 32 == 0, "{low} or {high} has more than 32 bits");
        self.0.push(low & 0xffff_ffff | high << 32);
        self
    }

    /// A divisor of numbers below 2^31. Larger ones give 0 for all of them, as 2^31 does.
    pub(super) fn divider(&mut self, divisor: u64) -> &mut Self {
        let divisor = divisor.clamp(1, 1 << 31);
        let shift = u64::from(divisor.next_power_of_two().trailing_zeros());
        let factor = (1_u64 << (31 + shift)).div_ceil(divisor);
        self.pair(divisor, factor).pair(shift, 0)
    }
}

/// Refuses a number that kernels count in 31 bits.
pub(super) fn countable(job: &Job<'_>, number: u64, what: &'static str) -> Result<u64> {
    if number > LONGEST { Err(job.unsupported(what)) } else { Ok(number) }
}

#[cfg(test)]
mod tests {
    use super::Words;

    #[test]
    fn dividers_divide() {
        let numbers = [0, 1, 2, 3, 255, 4095, 4096, 12345, 1 << 20, (1 << 30) - 1, 1 << 30, (1 << 31) - 1];
        for divisor in
            (1..2000).chain([4096, 65_537, 151_936, (1 << 30) - 1, 1 << 30, (1 << 31) - 1, 1 << 31, u64::MAX])
        {
            let mut words = Words(Vec::new());
            words.divider(divisor);
            let (factor, shift) = (words.0[0] >> 32, words.0[1] & 0xffff_ffff);
            for around in numbers {
                for number in
                    [around, around / divisor * divisor, (around / divisor * divisor).saturating_sub(1)]
                {
                    assert_eq!((number * factor) >> 31 >> shift, number / divisor, "{number} / {divisor}");
                }
            }
        }
    }
}
