//! A queue of reads that the kernel works off on its own. Memory that the kernel may still write to belongs to the queue
//! until the read has ended, and the queue does not go before that.
#![expect(unsafe_code, reason = "the kernel writes to memory it is told of")]

use std::fs::File;
use std::os::fd::AsRawFd;
use std::sync::OnceLock;
use std::time::Duration;

use io_uring::{IoUring, Probe, opcode, types};
use rustix::io::Errno;

use super::buffer::Buffer;
use super::gate::Outcome;

/// How often the kernel may say that it has no room just now, and how long to wait between.
const TRIES: u32 = 100;
const BETWEEN: Duration = Duration::from_millis(1);

/// Why `io_uring` cannot be used here: an old kernel, a filter, a limit. Asked once a process.
pub(crate) fn available() -> Result<(), String> {
    static ANSWER: OnceLock<Result<(), String>> = OnceLock::new();
    ANSWER.get_or_init(probe).clone()
}

fn probe() -> Result<(), String> {
    let ring = IoUring::new(2).map_err(|error| error.to_string())?;
    let mut probe = Probe::new();
    ring.submitter().register_probe(&mut probe).map_err(|error| error.to_string())?;
    if probe.is_supported(opcode::Read::CODE) { Ok(()) } else { Err("the kernel is too old".into()) }
}

/// Where a read goes.
#[derive(Debug)]
pub(crate) enum Memory<'a> {
    /// Straight to where the bytes are wanted.
    Target(&'a mut [u8]),
    /// To the first bytes of a buffer.
    Buffer(Buffer, usize),
}

impl Memory<'_> {
    /// The bytes to be filled.
    pub(crate) fn bytes(&mut self) -> &mut [u8] {
        match self {
            Self::Target(target) => target,
            Self::Buffer(buffer, size) => buffer.first(*size),
        }
    }
}

/// A read under way, and what its caller wants to find again.
#[derive(Debug)]
struct Flight<'a, T> {
    memory: Memory<'a>,
    tag: T,
    // The kernel takes the file when it takes the request, which may be later than `push`.
    _file: &'a File,
}

/// Reads under way. Never to be forgotten (`mem::forget`): dropping it waits for the kernel, which is what makes it sound.
#[derive(Debug)]
pub(crate) struct Ring<'a, T> {
    kernel: Handle,
    flights: Vec<Option<Flight<'a, T>>>,
    /// The kernel refused; nothing more is submitted.
    broken: bool,
}

struct Handle(IoUring);

impl std::fmt::Debug for Handle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("IoUring")
    }
}

impl<'a, T> Ring<'a, T> {
    /// A queue of up to `depth` reads.
    pub(crate) fn new(depth: usize) -> std::io::Result<Self> {
        let ring = IoUring::new(depth.next_power_of_two() as u32)?;
        Ok(Self { kernel: Handle(ring), flights: (0..depth).map(|_| None).collect(), broken: false })
    }

    /// Whether another read can be pushed.
    pub(crate) fn has_room(&self) -> bool {
        !self.broken && self.flights.iter().any(Option::is_none)
    }

    /// Begins to read into `memory` from `offset` on; what cannot be begun is given back.
    pub(crate) fn push(
        &mut self,
        file: &'a File,
        offset: u64,
        memory: Memory<'a>,
        tag: T,
    ) -> Result<(), (Memory<'a>, T)> {
        let free = self.flights.iter().position(Option::is_none);
        let (Some(slot), false) = (free, self.broken) else { return Err((memory, tag)) };
        let flight = self.flights[slot].insert(Flight { memory, tag, _file: file });
        let bytes = flight.memory.bytes();
        let read = opcode::Read::new(types::Fd(file.as_raw_fd()), bytes.as_mut_ptr(), bytes.len() as u32);
        let entry = read.offset(offset).build().user_data(slot as u64);
        // SAFETY: the memory and the file are in `flights` until the kernel says that the read has ended, and `drop`
        // waits for that.
        let pushed = unsafe { self.kernel.0.submission().push(&entry) };
        if pushed.is_err() {
            return self.flights[slot].take().map_or(Ok(()), |flight| Err((flight.memory, flight.tag)));
        }
        // What is not taken now is offered again by `wait`.
        let _ = self.kernel.0.submit();
        Ok(())
    }

    /// Waits for a read to end: its memory, its tag, and how many bytes came. `None` if none is under way.
    ///
    /// If the kernel refuses to go on, reads that it had not taken come back as cancelled.
    pub(crate) fn wait(&mut self) -> Option<(Memory<'a>, T, Outcome)> {
        let mut refusals = 0;
        loop {
            if let Some(ended) = self.ended() {
                return Some(ended);
            }
            if self.flights.iter().all(Option::is_none) {
                return None;
            }
            if self.broken {
                let waiting = self.kernel.0.submission().len();
                if self.flights.iter().flatten().count() <= waiting {
                    let flight = self.flights.iter_mut().find_map(Option::take)?;
                    return Some((flight.memory, flight.tag, Err(Errno::CANCELED)));
                }
                std::thread::sleep(BETWEEN);
                continue;
            }
            match self.kernel.0.submit_and_wait(1) {
                Ok(_) => {}
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => {
                    refusals += 1;
                    let passing = [Errno::AGAIN, Errno::BUSY, Errno::NOMEM].map(|e| Some(e.raw_os_error()));
                    if refusals >= TRIES || !passing.contains(&error.raw_os_error()) {
                        tracing::warn!(%error, "io_uring refuses to go on; reading without it");
                        self.broken = true;
                    }
                    std::thread::sleep(BETWEEN);
                }
            }
        }
    }

    fn ended(&mut self) -> Option<(Memory<'a>, T, Outcome)> {
        let entry = self.kernel.0.completion().next()?;
        let flight = self.flights.get_mut(entry.user_data() as usize)?.take()?;
        let result = entry.result();
        let outcome = usize::try_from(result).map_err(|_| Errno::from_raw_os_error(-result));
        Some((flight.memory, flight.tag, outcome))
    }
}

impl<T> Drop for Ring<'_, T> {
    fn drop(&mut self) {
        while self.wait().is_some() {}
    }
}
