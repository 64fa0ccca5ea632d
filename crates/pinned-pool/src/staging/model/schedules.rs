//! The ring's real threads under a model checker's scheduler, which decides who runs next: many interleavings of the code
//! that runs outside tests, and one that hangs or loses a wake-up is a failure.

use super::device::World;
use crate::error::{HostError, Result};
use crate::staging::queue::{Fate, LineId, Mutant, Queue, Step};
use crate::staging::sync::{Arc, Mutex, lock, thread};
use crate::staging::threads::{Device, Threads};

/// A job: its line, number and chunks, and the one that cannot be read.
#[derive(Debug, Clone)]
struct Job {
    line: LineId,
    number: u64,
    chunks: usize,
    broken: Option<usize>,
}

/// A device whose streams run when somebody asks.
#[derive(Debug, Clone)]
struct Fake(Arc<Mutex<World>>);

impl Device for Fake {
    type Job = Job;

    fn fill(&self, job: &Job, chunk: usize, slot: u32) -> Result<()> {
        lock(&self.0).begin_fill(slot);
        thread::yield_now();
        if job.broken == Some(chunk) {
            return Err(HostError::Forked);
        }
        lock(&self.0).filled(slot, Some((job.line, job.number, chunk)));
        Ok(())
    }

    fn begin(&self, job: &Job) -> Result<()> {
        lock(&self.0).submit(job.line, job.number, Step::Begin, job.chunks);
        Ok(())
    }

    fn copy(&self, job: &Job, chunk: usize, slot: u32) -> (Fate, Result<()>) {
        thread::yield_now();
        lock(&self.0).submit(job.line, job.number, Step::Copy { chunk, slot }, job.chunks);
        (Fate::Flying, Ok(()))
    }

    fn end(&self, job: &Job) -> Result<()> {
        lock(&self.0).submit(job.line, job.number, Step::End, job.chunks);
        Ok(())
    }

    fn is_reached(&self, slot: u32) -> Result<bool> {
        Ok(lock(&self.0).is_reached(slot))
    }

    /// Time passes: one step of each stream runs.
    fn pause(&self, _round: u32) {
        let mut world = lock(&self.0);
        for line in world.runnable() {
            world.run(line);
        }
        drop(world);
        thread::yield_now();
    }

    fn abandon(&mut self) {}
}

struct Rig {
    threads: Arc<Threads<Fake>>,
    world: Arc<Mutex<World>>,
}

impl Rig {
    fn new(slots: u32, threads: usize, mutant: Option<Mutant>) -> Self {
        let world = Arc::new(Mutex::new(World::new(slots)));
        let mut queue = Queue::new(slots);
        queue.mutant = mutant;
        let threads = Threads::of(queue, Fake(Arc::clone(&world)), threads).unwrap();
        Self { threads: Arc::new(threads), world }
    }

    fn submit(&self, line: LineId, number: u64, chunks: usize, broken: Option<usize>) {
        let job = Job { line, number, chunks, broken };
        assert_eq!(self.threads.submit(line, job, chunks).unwrap(), number);
    }

    fn wait(&self, line: LineId, number: u64) -> Result<()> {
        let (outcome, _) = self.threads.wait(line, number);
        if outcome.is_ok() {
            assert!(lock(&self.world).has_ended(line, number), "the wait was over too early");
        }
        outcome
    }

    /// Lets the streams run to their ends; nothing was wrong.
    fn check(&self) {
        let mut world = lock(&self.world);
        while let Some(&line) = world.runnable().first() {
            world.run(line);
        }
        assert!(world.wrong.is_empty(), "{:?}", world.wrong);
    }
}

fn check(scenario: fn()) {
    shuttle::check_random(scenario, 400);
    shuttle::check_pct(scenario, 400, 3);
}

#[test]
fn jobs_of_two_lines_are_submitted_in_order_and_all_threads_end() {
    check(|| {
        let rig = Rig::new(2, 2, None);
        let lines = [rig.threads.add_line(), rig.threads.add_line()];
        for number in 0..2 {
            rig.submit(lines[0], number, 2, None);
        }
        rig.submit(lines[1], 0, 1, None);
        rig.wait(lines[1], 0).unwrap();
        rig.wait(lines[0], 1).unwrap();
        rig.threads.join();
        rig.check();
        assert!(!rig.threads.is_flying(lines[0]) && !rig.threads.is_flying(lines[1]));
    });
}

#[test]
fn callers_in_several_threads_all_go_on() {
    check(|| {
        let rig = Arc::new(Rig::new(1, 2, None));
        let callers = [1, 2].map(|chunks| {
            let rig = Arc::clone(&rig);
            thread::spawn(move || {
                let line = rig.threads.add_line();
                rig.submit(line, 0, chunks, None);
                rig.submit(line, 1, chunks, None);
                rig.wait(line, 0).unwrap();
                rig.threads.wait_clear(line);
                rig.wait(line, 1).unwrap();
            })
        });
        for caller in callers {
            caller.join().unwrap();
        }
        rig.threads.join();
        rig.check();
    });
}

#[test]
fn a_read_that_fails_ends_its_job_alone() {
    check(|| {
        let rig = Rig::new(2, 2, None);
        let line = rig.threads.add_line();
        rig.submit(line, 0, 3, Some(1));
        rig.submit(line, 1, 2, None);
        assert!(matches!(rig.wait(line, 0), Err(HostError::Forked)));
        rig.wait(line, 1).unwrap();
        rig.threads.join();
        rig.check();
    });
}

#[test]
fn what_is_cancelled_is_over_when_cancel_returns() {
    check(|| {
        let rig = Rig::new(1, 2, None);
        let line = rig.threads.add_line();
        rig.submit(line, 0, 2, None);
        rig.submit(line, 1, 2, None);
        rig.threads.cancel(line);
        assert!(rig.threads.is_clear(line));
        let before = lock(&rig.world).clone();
        lock(&rig.world).forgive(line, 2);
        rig.submit(line, 2, 1, None);
        rig.wait(line, 2).unwrap();
        assert!(!before.has_ended(line, 2));
        rig.threads.join();
        rig.check();
    });
}

#[test]
fn a_ring_dropped_with_work_left_ends_by_itself() {
    check(|| {
        let rig = Rig::new(2, 2, None);
        let line = rig.threads.add_line();
        rig.submit(line, 0, 3, None);
        rig.threads.remove_line(line);
        // Its threads end all the same, or this scenario hangs.
    });
}

/// The checker is not blind.
#[test]
fn mistakes_are_noticed_here_too() {
    for mutant in [Mutant::ReuseEarly, Mutant::SubmitTogether, Mutant::WaitShort, Mutant::EndEarly] {
        let noticed = std::panic::catch_unwind(move || {
            shuttle::check_random(
                move || {
                    let rig = Rig::new(1, 2, Some(mutant));
                    let line = rig.threads.add_line();
                    rig.submit(line, 0, 2, None);
                    rig.submit(line, 1, 2, None);
                    rig.wait(line, 0).unwrap();
                    rig.wait(line, 1).unwrap();
                    rig.threads.join();
                    rig.check();
                },
                500,
            );
        });
        assert!(noticed.is_err(), "{mutant:?} went unnoticed");
    }
}
