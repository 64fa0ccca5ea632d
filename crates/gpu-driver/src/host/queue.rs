//! What the emulator's copy streams hold and what may run next: plain state and no threads. Times are only kept, never
//! acted on.
//!
//! A mark is a position in a stream: "reached" once that many of its operations have run. An event is the mark of
//! its latest record, so a record costs no operation, and a wait holds the mark of its own time, so later records
//! do not move it. `demand` is how far a stream is allowed to run; the copy order decides who raises it.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::Instant;

use crate::host::options::CopyOrder;
use crate::host::rng::Rng;

/// How often a mark may be asked for in vain before the lazy order runs it all the same: a real device gets there
/// in the end, so that a loop that polls must end too.
pub(super) const PATIENCE: u32 = 64;

/// A piece of device work. Running it twice, or in part before, must not matter: that is what the caller of an
/// asynchronous copy vouches for until the copy has run.
pub(super) trait Work: Clone + Send + 'static {
    /// Does it: all of it, or a part that `Part`'s number chooses.
    fn run(&self, share: Share);
}

/// How much of a piece of work to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Share {
    /// All, in order.
    All,
    /// All, in pieces shuffled by this number.
    Shuffled(u64),
    /// Some pieces, chosen by this number.
    Part(u64),
}

/// A point in a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Mark {
    pub(super) stream: u64,
    pub(super) position: u64,
}

#[derive(Debug)]
enum Op<W> {
    Work(W),
    Wait(Mark),
}

#[derive(Debug)]
struct Stream<W> {
    pending: VecDeque<Op<W>>,
    completed: u64,
    demand: u64,
    rng: Rng,
    /// The first pending work is to be done in part (random order only).
    tease: bool,
}

impl<W> Stream<W> {
    fn submitted(&self) -> u64 {
        self.completed + self.pending.len() as u64
    }
}

#[derive(Debug)]
struct Event {
    /// `None` counts as reached: never recorded, or recorded on the compute stream.
    mark: Option<Mark>,
    asked: u32,
    time: Time,
}

/// When an event's latest record was reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Time {
    /// The event keeps none.
    NotKept,
    /// Never recorded, or not reached yet.
    Ahead,
    Reached(Instant),
}

/// What a stream's thread does next.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Next<W> {
    /// Run this, then report it with [`Queue::finish`].
    Run(W, Share),
    /// Run this in part; it stays pending.
    Tease(W, Share),
    /// A wait was over and is gone; look again, and tell the others.
    Moved,
    /// Nothing, until something changes.
    Idle,
    /// End the thread.
    Stop,
}

/// All streams and events of one emulated device.
#[derive(Debug)]
pub(super) struct Queue<W> {
    order: CopyOrder,
    seed: u64,
    next_handle: u64,
    streams: BTreeMap<u64, Stream<W>>,
    events: HashMap<u64, Event>,
    /// How many of the events keep their time.
    timers: u64,
    stopping: bool,
}

impl<W: Work> Queue<W> {
    pub(super) fn new(order: CopyOrder, seed: u64) -> Self {
        Self {
            order,
            seed,
            next_handle: 1,
            streams: BTreeMap::new(),
            events: HashMap::new(),
            timers: 0,
            stopping: false,
        }
    }

    fn handle(&mut self) -> u64 {
        let handle = self.next_handle;
        self.next_handle += 1;
        handle
    }

    pub(super) fn add_stream(&mut self) -> u64 {
        let handle = self.handle();
        let demand = if self.order == CopyOrder::Eager { u64::MAX } else { 0 };
        let rng = Rng::new(self.seed, handle);
        self.streams
            .insert(handle, Stream { pending: VecDeque::new(), completed: 0, demand, rng, tease: false });
        handle
    }

    pub(super) fn has_stream(&self, stream: u64) -> bool {
        self.streams.contains_key(&stream)
    }

    /// Whether a stream has nothing left to run.
    pub(super) fn is_idle(&self, stream: u64) -> bool {
        self.streams.get(&stream).is_none_or(|stream| stream.pending.is_empty())
    }

    /// Forgets an idle stream; its marks count as reached.
    pub(super) fn remove_stream(&mut self, stream: u64) {
        self.streams.remove(&stream);
    }

    /// Ends all threads; what has not begun does not run.
    pub(super) fn stop(&mut self) {
        self.stopping = true;
    }

    pub(super) fn add_event(&mut self) -> u64 {
        let handle = self.handle();
        self.events.insert(handle, Event { mark: None, asked: 0, time: Time::NotKept });
        handle
    }

    pub(super) fn add_timer(&mut self) -> u64 {
        let handle = self.handle();
        self.events.insert(handle, Event { mark: None, asked: 0, time: Time::Ahead });
        self.timers += 1;
        handle
    }

    /// Whether the event is a timer, and one that was recorded.
    pub(super) fn keeps_time(&self, event: u64) -> bool {
        self.events.get(&event).is_some_and(|event| match event.time {
            Time::NotKept => false,
            Time::Ahead => event.mark.is_some(),
            Time::Reached(_) => true,
        })
    }

    /// The seconds between two timers, negative if they were reached the other way round; `None` if one was not.
    pub(super) fn elapsed(&self, start: u64, end: u64) -> Option<f64> {
        let time = |event| match self.events.get(&event)?.time {
            Time::Reached(at) => Some(at),
            Time::NotKept | Time::Ahead => None,
        };
        let (start, end) = (time(start)?, time(end)?);
        let forward = end.checked_duration_since(start);
        Some(forward.map_or_else(|| -(start - end).as_secs_f64(), |time| time.as_secs_f64()))
    }

    pub(super) fn has_event(&self, event: u64) -> bool {
        self.events.contains_key(&event)
    }

    pub(super) fn remove_event(&mut self, event: u64) -> bool {
        let removed = self.events.remove(&event);
        self.timers -= u64::from(removed.as_ref().is_some_and(|event| event.time != Time::NotKept));
        removed.is_some()
    }

    /// Makes the event mean the end of what the stream holds now; `None` is the compute stream.
    pub(super) fn record(&mut self, event: u64, stream: Option<u64>) {
        let mark = stream.and_then(|stream| self.end(stream));
        let reached = mark.is_none_or(|mark| self.reached(mark));
        if let Some(event) = self.events.get_mut(&event) {
            let time = match event.time {
                Time::NotKept => Time::NotKept,
                _ if reached => Time::Reached(Instant::now()),
                _ => Time::Ahead,
            };
            *event = Event { mark, asked: 0, time };
        }
    }

    /// The mark behind everything submitted to a stream.
    pub(super) fn end(&self, stream: u64) -> Option<Mark> {
        self.streams.get(&stream).map(|found| Mark { stream, position: found.submitted() })
    }

    /// The event's mark, unless it is reached.
    pub(super) fn unreached(&self, event: u64) -> Option<Mark> {
        self.events.get(&event)?.mark.filter(|mark| !self.reached(*mark))
    }

    pub(super) fn reached(&self, mark: Mark) -> bool {
        self.streams.get(&mark.stream).is_none_or(|stream| stream.completed >= mark.position)
    }

    /// Answers a query; in vain often enough, it also lets the stream run.
    pub(super) fn query(&mut self, event: u64) -> bool {
        let Some(mark) = self.unreached(event) else { return true };
        let Some(found) = self.events.get_mut(&event) else { return true };
        found.asked = found.asked.saturating_add(1);
        if found.asked >= PATIENCE {
            self.drive(mark);
        }
        false
    }

    /// Lets a stream run as far as a mark. True if that is news to its thread.
    pub(super) fn drive(&mut self, mark: Mark) -> bool {
        match self.streams.get_mut(&mark.stream) {
            Some(stream) if stream.demand < mark.position => {
                stream.demand = mark.position;
                true
            }
            _ => false,
        }
    }

    pub(super) fn submit_work(&mut self, stream: u64, work: W) {
        self.submit(stream, Op::Work(work));
    }

    pub(super) fn submit_wait(&mut self, stream: u64, event: u64) {
        if let Some(mark) = self.unreached(event) {
            self.submit(stream, Op::Wait(mark));
        }
    }

    fn submit(&mut self, stream: u64, op: Op<W>) {
        let random = self.order == CopyOrder::Random;
        let Some(stream) = self.streams.get_mut(&stream) else { return };
        stream.pending.push_back(op);
        if random && stream.rng.coin() {
            let ahead = stream.rng.below(stream.pending.len() as u64 + 1);
            stream.demand = stream.demand.max(stream.completed + ahead);
        }
        if random && stream.rng.coin() {
            stream.tease = true;
        }
    }

    /// What the thread of `stream` does next.
    pub(super) fn next(&mut self, stream: u64) -> Next<W> {
        if self.stopping {
            return Next::Stop;
        }
        let random = self.order == CopyOrder::Random;
        let Some(found) = self.streams.get_mut(&stream) else { return Next::Stop };
        let demanded = found.completed < found.demand;
        match found.pending.front() {
            Some(Op::Work(work)) if demanded => {
                let share = if random { Share::Shuffled(found.rng.next()) } else { Share::All };
                Next::Run(work.clone(), share)
            }
            Some(Op::Work(work)) if found.tease => {
                found.tease = false;
                Next::Tease(work.clone(), Share::Part(found.rng.next()))
            }
            Some(Op::Wait(mark)) if demanded => {
                let mark = *mark;
                if self.reached(mark) {
                    self.finish(stream);
                    return Next::Moved;
                }
                // Whoever waits for this stream waits for that one.
                if self.drive(mark) { Next::Moved } else { Next::Idle }
            }
            _ => Next::Idle,
        }
    }

    /// The first pending operation of a stream has run.
    pub(super) fn finish(&mut self, stream: u64) {
        if let Some(found) = self.streams.get_mut(&stream)
            && found.pending.pop_front().is_some()
        {
            found.completed += 1;
            found.tease = false;
        }
        if self.timers > 0 {
            self.note_times(stream);
        }
    }

    /// Keeps the time for the timers that a stream has reached.
    fn note_times(&mut self, stream: u64) {
        let completed = self.streams.get(&stream).map_or(u64::MAX, |stream| stream.completed);
        for event in self.events.values_mut().filter(|event| event.time == Time::Ahead) {
            if event.mark.is_some_and(|mark| mark.stream == stream && mark.position <= completed) {
                event.time = Time::Reached(Instant::now());
            }
        }
    }

    /// The first work not yet done that `matches`, if any.
    pub(super) fn find_pending(&self, matches: impl Fn(&W) -> bool) -> Option<W> {
        let works = self.streams.values().flat_map(|stream| &stream.pending);
        works
            .filter_map(|op| if let Op::Work(work) = op { Some(work) } else { None })
            .find(|work| matches(work))
            .cloned()
    }

    pub(super) fn stream_count(&self) -> u64 {
        self.streams.len() as u64
    }

    pub(super) fn event_count(&self) -> u64 {
        self.events.len() as u64
    }
}
