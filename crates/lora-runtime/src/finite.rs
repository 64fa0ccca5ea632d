//! Looks for numbers that are none in an adapter's tensors: one NaN in a factor makes every output of its layer NaN.
//!
//! Only the exponent's bits are looked at, of all elements in a word at once, on all threads: what costs is reading the memory.

use rayon::iter::{IndexedParallelIterator, IntoParallelRefIterator, ParallelIterator};
use rayon::slice::ParallelSlice;

/// Bytes that one thread looks at together: enough to hide the hand-over, and few enough that tensors of a file share threads.
const CHUNK: usize = 1 << 20;
/// Words whose findings are put together before anybody asks: whole registers of every size there is.
const GROUP: usize = 512;
/// Bytes of a word.
const WORD: usize = size_of::<u64>();

/// A number that is none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NotFinite {
    /// Which of the given tensors has it.
    pub tensor: usize,
    /// Which element of it, in the order of memory: the first that is none.
    pub element: usize,
    /// Whether it is infinite; otherwise it is NaN.
    pub infinite: bool,
}

/// The first element that is NaN or infinite of each of these tensors that has one: type as safetensors spells it, and bytes.
/// Types that have no such numbers have none.
pub fn not_finite(tensors: &[(&str, &[u8])]) -> Vec<NotFinite> {
    let first = |(tensor, (dtype, bytes)): (usize, &(&str, &[u8]))| {
        let type_ = Type::named(dtype)?;
        let element = type_.first(bytes)?;
        Some(NotFinite { tensor, element, infinite: type_.is_infinite(bytes, element) })
    };
    tensors.par_iter().enumerate().filter_map(first).collect()
}

/// A type of floats, in every lane of a word.
#[derive(Debug, Clone, Copy)]
struct Type {
    /// Bytes of an element.
    size: usize,
    /// The bits that are all set in what is no number.
    exponent: u64,
    /// The lowest of them: added to all of them, it carries into the sign's place and no farther.
    lowest: u64,
    /// The place of the sign.
    sign: u64,
}

impl Type {
    fn named(dtype: &str) -> Option<Self> {
        let (size, exponent) = match dtype {
            "BF16" => (2, 0x7F80_u64),
            "F16" => (2, 0x7C00),
            "F32" => (4, 0x7F80_0000),
            "F64" => (8, 0x7FF0_0000_0000_0000),
            // It has no infinity, and numbers with all bits of the exponent set.
            "F8_E4M3" => (1, 0x7F),
            "F8_E5M2" => (1, 0x7C),
            _ => return None,
        };
        let lanes = u64::MAX / (u64::MAX >> (64 - 8 * size));
        let lowest = 1 << exponent.trailing_zeros();
        Some(Self { size, exponent: exponent * lanes, lowest: lowest * lanes, sign: lanes << (8 * size - 1) })
    }

    /// The signs' places of the lanes that hold no number.
    fn none(self, word: u64) -> u64 {
        ((word & self.exponent) + self.lowest) & self.sign
    }

    /// The first element that is none.
    fn first(self, bytes: &[u8]) -> Option<usize> {
        bytes.par_chunks(CHUNK).enumerate().find_map_first(|(number, chunk)| {
            let (words, rest) = chunk.as_chunks::<WORD>();
            // One branch a group: the loop inside has none, and is made of whole registers.
            let any = |group: &[[u8; WORD]]| {
                group.iter().fold(0, |any, bytes| any | self.none(u64::from_le_bytes(*bytes))) != 0
            };
            let group = words.chunks(GROUP).position(any).map(|group| group * GROUP);
            let at = group.unwrap_or(words.len()) * WORD;
            let elements = chunk.get(at..).filter(|_| group.is_some() || !rest.is_empty())?;
            let within =
                elements.chunks_exact(self.size).position(|element| self.none(word(element)) != 0)?;
            Some((number * CHUNK + at) / self.size + within)
        })
    }

    /// Whether an element that is none is infinite.
    fn is_infinite(self, bytes: &[u8], element: usize) -> bool {
        let one = bytes.get(element * self.size..).and_then(|rest| rest.get(..self.size)).map_or(0, word);
        // Of an element, which fills the first lane alone.
        let mantissa = !(self.exponent | self.sign) & (u64::MAX >> (64 - 8 * self.size));
        mantissa != 0 && one & mantissa == 0
    }
}

/// An element in the first lane of a word, with zeros in the others.
fn word(element: &[u8]) -> u64 {
    let mut bytes = [0; WORD];
    bytes.iter_mut().zip(element).for_each(|(to, from)| *to = *from);
    u64::from_le_bytes(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A type's bytes of 1, NaN, infinity and the largest number; no infinity for the one that has none.
    type Words = (&'static str, Vec<u8>, Vec<u8>, Option<Vec<u8>>, Vec<u8>);

    fn types() -> [Words; 6] {
        let f64 = |number: f64| number.to_le_bytes().to_vec();
        let f32 = |number: f32| number.to_le_bytes().to_vec();
        let two = |word: u16| word.to_le_bytes().to_vec();
        [
            ("F64", f64(1.0), f64(-f64::NAN), Some(f64(f64::NEG_INFINITY)), f64(f64::MAX)),
            ("F32", f32(1.0), f32(f32::NAN), Some(f32(f32::INFINITY)), f32(f32::MIN)),
            ("BF16", two(0x3F80), two(0xFFC0), Some(two(0x7F80)), two(0x7F7F)),
            ("F16", two(0x3C00), two(0x7C01), Some(two(0xFC00)), two(0xFBFF)),
            ("F8_E4M3", vec![0x38], vec![0xFF], None, vec![0x7E]),
            ("F8_E5M2", vec![0x3C], vec![0x7D], Some(vec![0xFC]), vec![0x7B]),
        ]
    }

    #[test]
    fn the_first_of_every_type_is_found_wherever_it_is() {
        for (dtype, one, nan, infinity, largest) in types() {
            let size = one.len();
            let count = 3 * CHUNK / size + 77;
            let plain: Vec<u8> = [one, largest].concat().repeat(count / 2 + 1)[..count * size].to_vec();
            assert_eq!(not_finite(&[(dtype, &plain)]), [], "{dtype}");
            for at in [
                0,
                1,
                GROUP * WORD / size - 1,
                GROUP * WORD / size,
                CHUNK / size - 1,
                CHUNK / size,
                count - 2,
                count - 1,
            ] {
                for (word, infinite) in [(Some(&nan), false), (infinity.as_ref(), true)] {
                    let Some(word) = word else { continue };
                    let mut bytes = plain.clone();
                    for later in [count - 1, at] {
                        bytes[later * size..][..size].copy_from_slice(word);
                    }
                    let found = not_finite(&[(dtype, &plain), (dtype, &bytes)]);
                    assert_eq!(found, [NotFinite { tensor: 1, element: at, infinite }], "{dtype} {at}");
                }
            }
        }
    }

    #[test]
    fn integers_and_empty_tensors_have_none() {
        let ones = [0xFF_u8; 64];
        assert_eq!(not_finite(&[("I32", &ones), ("U8", &ones), ("BF16", &[]), ("F32", &ones[..3])]), []);
    }

    #[test]
    fn every_half_word_is_as_its_type_says() {
        for word in 0..=u16::MAX {
            let wide = f32::from_bits(u32::from(word) << 16);
            let found = not_finite(&[("BF16", &word.to_le_bytes())]);
            assert_eq!(
                found.first().map(|one| one.infinite),
                (!wide.is_finite()).then(|| wide.is_infinite())
            );
        }
    }
}
