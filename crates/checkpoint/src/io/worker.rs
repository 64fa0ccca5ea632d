//! What each thread does: take the next chunk, read it the way its file is read, put its bytes where they are wanted.
//! Whatever a fast way leaves undone, for whatever reason, is finished by plain reads, which alone decide what is an error.
#![forbid(unsafe_code)]

use std::fs::File;
use std::io::{self, IoSliceMut};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use rustix::io::Errno;

use super::buffer::Buffer;
use super::chunks::{Chunk, Part};
use super::gate::{self, Gate, Outcome, Route};
use super::place::DirectFile;
use super::uring::{Memory, Ring};
use super::{Cancel, OpenFile};
use crate::error::{CheckpointError, Result};
use crate::mapping::system;

/// How often an interrupted direct read is tried again before plain reads take over.
const TRIES: u32 = 8;

/// From this many bytes on the pages of a target are made ready ahead.
const LONG: usize = 256 << 10;

/// A file as the workers see it.
#[derive(Debug)]
pub(super) struct Source<'a> {
    pub(super) open: &'a OpenFile,
    /// For reads through the page cache, if not the open file itself.
    pub(super) buffered: Option<File>,
    /// For reads past it.
    pub(super) direct: Option<DirectFile>,
    /// How it is to be read.
    pub(super) route: Route,
    /// Whether chunks in the page cache are read through it all the same.
    pub(super) mixed: bool,
    /// Direct reads turned out not to work.
    pub(super) refused: AtomicBool,
    /// Bytes that reads gave.
    pub(super) read: AtomicU64,
    /// Those of them that went through a buffer.
    pub(super) bounced: AtomicU64,
}

/// What a job is, for errors.
#[derive(Debug, Clone, Copy)]
pub(super) struct Named<'a> {
    pub(super) name: &'a str,
    pub(super) offset: u64,
    pub(super) size: u64,
}

/// What the threads of one call share.
pub(super) struct Shared<'a> {
    pub(super) sources: &'a [Source<'a>],
    pub(super) jobs: &'a [Named<'a>],
    pub(super) queue: Mutex<std::vec::IntoIter<Chunk<'a>>>,
    pub(super) failure: Mutex<Option<CheckpointError>>,
    pub(super) stop: AtomicBool,
    pub(super) cancel: Option<&'a Cancel>,
    pub(super) progress: Option<&'a (dyn Fn(u64) + Sync)>,
    pub(super) gate: &'a dyn Gate,
    /// How many reads each thread's queue holds.
    pub(super) depth: usize,
}

impl<'a> Shared<'a> {
    fn next(&self) -> Option<Chunk<'a>> {
        if self.stop.load(Ordering::Relaxed) {
            return None;
        }
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        // Only a call that has something left to do can be cancelled.
        if !queue.as_slice().is_empty() && self.cancel.is_some_and(Cancel::is_cancelled) {
            drop(queue);
            self.fail(CheckpointError::Cancelled);
            return None;
        }
        queue.next()
    }

    /// Keeps the first failure and stops all threads.
    fn fail(&self, error: CheckpointError) {
        self.stop.store(true, Ordering::Relaxed);
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
    }
}

/// Works until there are no chunks left or something failed.
pub(super) fn work(shared: &Shared<'_>) {
    let mut worker = Worker { shared, ring: None, no_ring: false, spare: Vec::new() };
    loop {
        while worker.ring.as_ref().is_none_or(Ring::has_room)
            && let Some(chunk) = shared.next()
        {
            worker.begin(chunk);
        }
        let Some((chunk, memory, outcome)) = worker.wait() else { return };
        // The device gets its next read before the bytes of this one are copied.
        if let Some(next) = shared.next() {
            worker.begin(next);
        }
        worker.land(Route::Uring, chunk, memory, outcome);
    }
}

struct Worker<'s, 'a> {
    shared: &'s Shared<'a>,
    ring: Option<Ring<'a, Chunk<'a>>>,
    no_ring: bool,
    spare: Vec<Buffer>,
}

impl<'a> Worker<'_, 'a> {
    fn source(&self, chunk: &Chunk<'a>) -> &'a Source<'a> {
        &self.shared.sources[chunk.file]
    }

    fn begin(&mut self, chunk: Chunk<'a>) {
        let source = self.source(&chunk);
        match (&source.direct, source.route) {
            (Some(direct), Route::Direct | Route::Uring) if !through_cache(source, &chunk) => {
                self.begin_direct(source, direct, chunk);
            }
            _ => self.through_cache(source, chunk),
        }
    }

    /// Reads past the page cache: at once, or by the queue.
    fn begin_direct(&mut self, source: &'a Source<'a>, direct: &'a DirectFile, mut chunk: Chunk<'a>) {
        let align = direct.offset_align as u64;
        let start = chunk.range.start / align * align;
        let memory = self.memory(direct, &mut chunk, start);
        if source.route == Route::Direct || !self.has_ring() {
            let (memory, outcome) = self.direct(&direct.file, start, memory);
            self.land(Route::Direct, chunk, memory, outcome);
        } else if let Some(ring) = &mut self.ring
            && let Err((memory, chunk)) = ring.push(&direct.file, start, memory, chunk)
        {
            self.land(Route::Uring, chunk, memory, Err(Errno::CANCELED));
        }
    }

    /// Where an aligned read may go: straight to the target, which is taken out of the chunk, or to a buffer.
    fn memory(&mut self, direct: &DirectFile, chunk: &mut Chunk<'a>, start: u64) -> Memory<'a> {
        let (align, end) = (direct.offset_align as u64, chunk.range.end);
        if let [part] = &mut chunk.parts[..] {
            let fits = chunk.range.start == start
                && end.is_multiple_of(align)
                && part.target.as_ptr().addr().is_multiple_of(direct.memory_align);
            if fits {
                return Memory::Target(std::mem::take(&mut part.target));
            }
        }
        let size = (end.next_multiple_of(align) - start) as usize;
        Memory::Buffer(self.spare.pop().unwrap_or_else(Buffer::new), size)
    }

    fn has_ring(&mut self) -> bool {
        if self.ring.is_none() && !self.no_ring {
            match Ring::new(self.shared.depth) {
                Ok(ring) => self.ring = Some(ring),
                Err(error) => {
                    tracing::debug!(%error, "no io_uring for this thread; reading without it");
                    self.no_ring = true;
                }
            }
        }
        self.ring.is_some()
    }

    fn direct(&self, file: &File, offset: u64, mut memory: Memory<'a>) -> (Memory<'a>, Outcome) {
        let mut tries = 0;
        loop {
            let outcome = self.pread(Route::Direct, file, memory.bytes(), offset);
            tries += 1;
            if outcome != Err(Errno::INTR) || tries == TRIES {
                return (memory, outcome);
            }
        }
    }

    /// Waits for one read of the queue to end; `None` if none is under way.
    fn wait(&mut self) -> Option<(Chunk<'a>, Memory<'a>, Outcome)> {
        let (mut memory, chunk, outcome) = self.ring.as_mut().and_then(Ring::wait)?;
        let outcome = gate::pass(self.shared.gate, Route::Uring, memory.bytes(), outcome);
        Some((chunk, memory, outcome))
    }

    /// Takes what a direct read brought, and finishes the chunk.
    fn land(&mut self, route: Route, mut chunk: Chunk<'a>, memory: Memory<'a>, outcome: Outcome) {
        let source = self.source(&chunk);
        let read = match outcome {
            Ok(read) => read as u64,
            Err(error) => {
                if matches!(error, Errno::INVAL | Errno::OPNOTSUPP) {
                    source.refused.store(true, Ordering::Relaxed);
                }
                tracing::debug!(%error, ?route, "a direct read failed; reading through the page cache");
                0
            }
        };
        source.read.fetch_add(read, Ordering::Relaxed);
        let mut upto = chunk.range.start;
        match memory {
            Memory::Target(target) => {
                upto += read;
                if let [part] = &mut chunk.parts[..] {
                    part.target = target;
                }
            }
            Memory::Buffer(mut buffer, size) => {
                source.bounced.fetch_add(read, Ordering::Relaxed);
                // The buffer begins at an aligned offset at or before the chunk.
                let align = source.direct.as_ref().map_or(1, |direct| direct.offset_align as u64);
                let start = chunk.range.start / align * align;
                upto = upto.max(start + read);
                scatter(&buffer.first(size)[..read as usize], start, &mut chunk.parts);
                self.spare.push(buffer);
            }
        }
        self.finish(source, chunk, upto);
    }

    /// Reads a chunk through the page cache: one call for all its parts and the holes between.
    fn through_cache(&mut self, source: &'a Source<'a>, mut chunk: Chunk<'a>) {
        chunk.parts.iter_mut().for_each(make_ready);
        let start = chunk.range.start;
        let read = if chunk.parts.len() > 1 { self.preadv(buffered(source), &mut chunk) } else { 0 };
        source.read.fetch_add(read, Ordering::Relaxed);
        self.finish(source, chunk, start + read);
    }

    /// How many bytes one vectored read gave; an error is left to the reads that finish the chunk.
    fn preadv(&self, file: &File, chunk: &mut Chunk<'a>) -> u64 {
        let holes = (chunk.range.end - chunk.range.start - chunk.bytes()) as usize;
        let mut spill = vec![0; holes];
        let mut spill = &mut spill[..];
        let mut targets = Vec::with_capacity(2 * chunk.parts.len());
        let mut at = chunk.range.start;
        for part in &mut chunk.parts {
            if part.at > at {
                let (hole, rest) = std::mem::take(&mut spill).split_at_mut((part.at - at) as usize);
                targets.push(IoSliceMut::new(hole));
                spill = rest;
            }
            at = part.range().end;
            targets.push(IoSliceMut::new(part.target));
        }
        let outcome = rustix::io::preadv(file, &mut targets, chunk.range.start);
        gate::pass_vectored(self.shared.gate, Route::Buffered, &mut targets, outcome).unwrap_or(0) as u64
    }

    /// Reads what is missing of each part, given the bytes of the file up to `upto`, and reports the chunk.
    fn finish(&mut self, source: &Source<'_>, mut chunk: Chunk<'a>, upto: u64) {
        for part in &mut chunk.parts {
            let done = upto.clamp(part.at, part.range().end) - part.at;
            if let Err(error) = self.fill(source, part, done as usize) {
                self.shared.fail(error);
                return;
            }
        }
        if let Some(progress) = self.shared.progress {
            progress(chunk.bytes());
        }
    }

    fn fill(&self, source: &Source<'_>, part: &mut Part<'_>, mut done: usize) -> Result<()> {
        let named = self.shared.jobs[part.job];
        let what = || format!("tensor {:?}", named.name);
        while done < part.target.len() {
            let at = part.at + done as u64;
            match self.pread(Route::Buffered, buffered(source), &mut part.target[done..], at) {
                Ok(0) => return Err(source.open.truncated(&what(), named.offset, named.size, at)),
                Ok(read) => {
                    done += read;
                    source.read.fetch_add(read as u64, Ordering::Relaxed);
                }
                Err(Errno::INTR | Errno::AGAIN) => {}
                Err(error) => return Err(source.open.failed(&what(), at, io::Error::from(error))),
            }
        }
        Ok(())
    }

    fn pread(&self, route: Route, file: &File, target: &mut [u8], offset: u64) -> Outcome {
        let outcome = rustix::io::pread(file, &mut *target, offset);
        gate::pass(self.shared.gate, route, target, outcome)
    }
}

fn buffered<'s>(source: &'s Source<'_>) -> &'s File {
    source.buffered.as_ref().unwrap_or_else(|| source.open.file())
}

/// Whether a chunk of a file that is read past the page cache is better read through it.
fn through_cache(source: &Source<'_>, chunk: &Chunk<'_>) -> bool {
    source.refused.load(Ordering::Relaxed)
        || source.mixed
            && source.open.resident_fraction(chunk.range.clone()).is_some_and(|resident| resident > 0.5)
}

/// Prepares the memory of a part that is long enough for it to matter.
fn make_ready(part: &mut Part<'_>) {
    if part.target.len() >= LONG {
        system::populate(part.target);
    }
}

/// Copies what a buffer holds, from `start` in the file on, to the parts.
fn scatter(bytes: &[u8], start: u64, parts: &mut [Part<'_>]) {
    for part in parts {
        let from = ((part.at - start) as usize).min(bytes.len());
        make_ready(part);
        let found = &bytes[from..];
        let size = found.len().min(part.target.len());
        part.target[..size].copy_from_slice(&found[..size]);
    }
}
