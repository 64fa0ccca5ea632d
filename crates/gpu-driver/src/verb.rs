//! The verbs of the seam as values, so that tests can count them and make one of them fail.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! verbs {
    ($($(#[$doc:meta])* $variant:ident => $name:literal,)*) => {
        /// One method of [`Driver`](crate::Driver).
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Verb {
            $($(#[$doc])* $variant,)*
        }

        impl Verb {
            /// Every verb, in the order of the trait.
            pub const ALL: &[Self] = &[$(Self::$variant,)*];

            /// The method's name.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)*
                }
            }
        }
    };
}

verbs! {
    /// How much memory is free.
    MemoryInfo => "memory_info",
    /// Reserve addresses.
    ReserveAddress => "reserve_address",
    /// Give addresses back.
    FreeAddress => "free_address",
    /// Make physical memory.
    CreatePages => "create_pages",
    /// Give physical memory back.
    ReleasePages => "release_pages",
    /// Map physical memory.
    MapPages => "map_pages",
    /// Take mappings away.
    UnmapPages => "unmap_pages",
    /// Set what may be done at mapped addresses.
    SetAccess => "set_access",
    /// Make a copy stream.
    CreateStream => "create_stream",
    /// End a copy stream.
    DestroyStream => "destroy_stream",
    /// Block until a stream has run.
    SynchronizeStream => "synchronize_stream",
    /// Ask whether a stream is being captured.
    IsCapturing => "is_capturing",
    /// Make an event.
    CreateEvent => "create_event",
    /// Make an event that keeps its time.
    CreateTimer => "create_timer",
    /// The time between two events.
    Elapsed => "elapsed",
    /// End an event.
    DestroyEvent => "destroy_event",
    /// Mark a point in a stream.
    RecordEvent => "record_event",
    /// Make a stream wait for a mark.
    WaitEvent => "wait_event",
    /// Ask whether a mark has been reached.
    QueryEvent => "query_event",
    /// Block until a mark has been reached.
    SynchronizeEvent => "synchronize_event",
    /// Page-lock host memory.
    RegisterHost => "register_host",
    /// Unlock host memory.
    UnregisterHost => "unregister_host",
    /// Copy to the device.
    CopyToDevice => "copy_to_device",
    /// Copy to the host.
    CopyToHost => "copy_to_host",
    /// Set device memory to one value.
    Fill => "fill",
    /// Load a module of kernels.
    LoadModule => "load_module",
    /// Unload it.
    UnloadModule => "unload_module",
    /// Find a kernel of it.
    FindKernel => "find_kernel",
    /// Submit a kernel.
    Launch => "launch",
}

impl fmt::Display for Verb {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Calls counted by verb, from any thread.
#[derive(Debug)]
pub(crate) struct VerbCounts {
    counts: Vec<AtomicU64>,
}

impl VerbCounts {
    pub(crate) fn new() -> Self {
        Self { counts: Verb::ALL.iter().map(|_| AtomicU64::new(0)).collect() }
    }

    /// Counts a call and says which one it is, from 0.
    pub(crate) fn add(&self, verb: Verb) -> u64 {
        self.counts.get(verb as usize).map_or(0, |count| count.fetch_add(1, Ordering::Relaxed))
    }

    pub(crate) fn get(&self, verb: Verb) -> u64 {
        self.counts.get(verb as usize).map_or(0, |count| count.load(Ordering::Relaxed))
    }

    pub(crate) fn reset(&self) {
        for count in &self.counts {
            count.store(0, Ordering::Relaxed);
        }
    }

    pub(crate) fn snapshot(&self) -> BTreeMap<Verb, u64> {
        Verb::ALL.iter().map(|verb| (*verb, self.get(*verb))).collect()
    }
}
