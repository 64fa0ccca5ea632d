//! The emulator's copies and fills: the bytes, the pieces they go in, and the time a modelled link takes.

use std::ops::Range;
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::host::queue::{Share, Work};
use crate::host::rng::Rng;
use crate::platform;
use crate::types::{Bytes, DeviceAddress};

/// The most pieces one copy is shuffled in.
const MOST_PIECES: u64 = 48;
/// A gap on the link shorter than this is the machine's timer being late, not an idle link.
const TIMER_SLACK: Duration = Duration::from_micros(250);
/// How much time a modelled link moves at once.
const CHUNK: Duration = Duration::from_millis(1);

/// One direction of the modelled link: copies share it, one after another.
#[derive(Debug)]
pub(super) struct Link {
    bytes_per_second: u64,
    free_at: Mutex<Instant>,
}

impl Link {
    pub(super) fn new(bytes_per_second: u64) -> Self {
        Self { bytes_per_second, free_at: Mutex::new(Instant::now()) }
    }

    /// How many bytes go in one chunk.
    fn chunk(&self) -> u64 {
        let bytes = u128::from(self.bytes_per_second) * CHUNK.as_nanos() / 1_000_000_000;
        u64::try_from(bytes).unwrap_or(u64::MAX).max(4096)
    }

    /// Blocks for as long as the link needs for `size` bytes after all that went before.
    fn pass(&self, size: u64) {
        let needed = Duration::from_secs_f64(size as f64 / self.bytes_per_second as f64);
        let until = {
            let mut free_at = self.free_at.lock().unwrap_or_else(PoisonError::into_inner);
            let now = Instant::now();
            let start = if *free_at + TIMER_SLACK < now { now } else { *free_at };
            *free_at = start + needed;
            *free_at
        };
        thread::sleep(until.saturating_duration_since(Instant::now()));
    }
}

/// What a piece of work does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    /// Host bytes to a device address; guarded if they may be a file's that is cut short, which would end the process.
    ToDevice { target: u64, source: usize, guarded: bool },
    /// Device bytes to a host address.
    ToHost { target: usize, source: u64 },
    /// One value to a device address.
    Fill { target: u64, value: u8 },
}

/// A copy or fill of `size` bytes.
#[derive(Debug, Clone)]
pub(super) struct Transfer {
    pub(super) action: Action,
    pub(super) size: Bytes,
    pub(super) link: Option<Arc<Link>>,
}

impl Transfer {
    fn device_range(&self) -> Range<u64> {
        let start = match self.action {
            Action::ToDevice { target, .. } | Action::Fill { target, .. } => target,
            Action::ToHost { source, .. } => source,
        };
        start..start + self.size.0
    }

    /// Whether it uses a byte of the device range.
    pub(super) fn touches_device(&self, address: DeviceAddress, size: Bytes) -> bool {
        overlap(&self.device_range(), &(address.0..address.0 + size.0))
    }

    /// Whether it uses a byte of the host range.
    pub(super) fn touches_host(&self, range: &Range<u64>) -> bool {
        let start = match self.action {
            Action::ToDevice { source, .. } => source as u64,
            Action::ToHost { target, .. } => target as u64,
            Action::Fill { .. } => return false,
        };
        overlap(&(start..start + self.size.0), range)
    }

    /// Moves the bytes of one piece.
    fn piece(&self, piece: &Range<u64>) {
        let (offset, count) = (piece.start as usize, (piece.end - piece.start) as usize);
        let (target, source) = match self.action {
            Action::ToDevice { target, source, guarded: true } => {
                let target: *mut u8 = ptr::with_exposed_provenance_mut(target as usize + offset);
                // SAFETY: as for the fill below; every byte of device memory is some byte.
                let target = unsafe { std::slice::from_raw_parts_mut(target, count) };
                let done = platform::read_guarded(source + offset, target);
                if done < count {
                    // A GPU still has the old bytes; here they are gone, and nothing may look as if it had been copied.
                    tracing::error!(
                        address = source + offset,
                        done,
                        count,
                        "registered memory has gone: read as 0xFF"
                    );
                    target[done..].fill(0xFF);
                }
                return;
            }
            Action::ToDevice { target, source, .. } => (target as usize, source),
            Action::ToHost { target, source } => (target, source as usize),
            Action::Fill { target, value } => {
                let target: *mut u8 = ptr::with_exposed_provenance_mut(target as usize + offset);
                // SAFETY: the range was mapped with write access when the work was submitted, the memory table
                // refuses to unmap it while the work is pending, and the submitter vouches for exclusive use.
                unsafe { ptr::write_bytes(target, value, count) };
                return;
            }
        };
        let source: *const u8 = ptr::with_exposed_provenance(source + offset);
        let target: *mut u8 = ptr::with_exposed_provenance_mut(target + offset);
        // SAFETY: as for the fill on the device side; the submitter vouches for the host side, and `copy` takes
        // ranges that overlap.
        unsafe { ptr::copy(source, target, count) };
    }

    /// The copy cut at random places, in random order.
    fn pieces(&self, rng: &mut Rng) -> Vec<Range<u64>> {
        let largest = (self.size.0 / MOST_PIECES).max(16) * 2;
        let mut pieces = Vec::new();
        let mut start = 0;
        while start < self.size.0 {
            let end = (start + 1 + rng.below(largest)).min(self.size.0);
            pieces.push(start..end);
            start = end;
        }
        rng.shuffle(&mut pieces);
        pieces
    }

    fn all_in_order(&self) {
        let Some(link) = &self.link else { return self.piece(&(0..self.size.0)) };
        let mut start = 0;
        while start < self.size.0 {
            let end = (start + link.chunk()).min(self.size.0);
            // Late rather than early, so that a missing wait shows.
            link.pass(end - start);
            self.piece(&(start..end));
            start = end;
        }
    }
}

impl Work for Transfer {
    fn run(&self, share: Share) {
        match share {
            Share::All => self.all_in_order(),
            Share::Shuffled(seed) => {
                for piece in self.pieces(&mut Rng::new(seed, 0)) {
                    if let Some(link) = &self.link {
                        link.pass(piece.end - piece.start);
                    }
                    self.piece(&piece);
                }
            }
            Share::Part(seed) => {
                let mut rng = Rng::new(seed, 1);
                let pieces = self.pieces(&mut rng);
                let count = rng.below(pieces.len() as u64 + 1) as usize;
                for piece in &pieces[..count] {
                    self.piece(piece);
                }
            }
        }
    }
}

fn overlap(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.start < b.end && b.start < a.end
}
