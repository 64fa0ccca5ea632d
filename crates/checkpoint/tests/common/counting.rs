//! An allocator that counts what each thread takes, and what some work took of it.
#![allow(unsafe_code, reason = "a global allocator is unsafe by nature")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

/// What this thread holds, held at most, and how often it asked.
#[derive(Debug, Clone, Copy, Default)]
struct Count {
    held: isize,
    peak: isize,
    calls: usize,
}

thread_local! {
    static COUNT: Cell<Count> = const { Cell::new(Count { held: 0, peak: 0, calls: 0 }) };
}

struct Counting;

fn count(bytes: isize) {
    COUNT.with(|count| {
        let mut now = count.get();
        now.held += bytes;
        now.peak = now.peak.max(now.held);
        now.calls += usize::from(bytes > 0);
        count.set(now);
    });
}

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size().cast_signed());
        // SAFETY: as the caller promised.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(-layout.size().cast_signed());
        // SAFETY: as the caller promised.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// What some work took of this thread's memory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Taken {
    /// Bytes held at most, beyond what was held before.
    pub(crate) peak: isize,
    /// How often memory was asked for.
    pub(crate) allocations: usize,
}

/// Does some work on this thread.
pub(crate) fn taken<T>(work: impl FnOnce() -> T) -> (T, Taken) {
    let before = COUNT.with(|count| {
        let held = count.get().held;
        count.set(Count { held, peak: held, calls: 0 });
        held
    });
    let outcome = work();
    let after = COUNT.with(Cell::get);
    (outcome, Taken { peak: after.peak - before, allocations: after.calls })
}
