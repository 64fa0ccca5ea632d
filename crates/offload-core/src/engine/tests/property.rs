//! Many random cases, all of which must compute with the right bytes, and the mistakes they must notice.

use super::Mutant;
use super::case::{Tally, run};
use super::rig::Failure;

const CASES: u64 = 1000;

#[test]
fn every_computation_reads_its_own_bytes() {
    let mut tallies = Vec::new();
    for seed in 0..CASES {
        match run(seed, None) {
            Ok(tally) => tallies.push(tally),
            Err(error) => panic!("case {seed}: {error}"),
        }
    }
    let cases = |test: fn(&Tally) -> bool| tallies.iter().filter(|tally| test(tally)).count() as u64;
    let twice = cases(|tally| tally.streamed_twice);
    assert!(twice * 100 >= CASES * 80, "only {twice} of {CASES} cases stream a unit twice");
    // The suite does what it says.
    for (what, count, least) in [
        ("replans", cases(|tally| tally.replans > 0), 200),
        ("raised budgets", cases(|tally| tally.raises > 0), 150),
        ("lowered budgets", cases(|tally| tally.lowers > 0), 150),
        ("budgets refused by a failure", cases(|tally| tally.unraised > 0), 8),
        ("lowered budgets completed by a step", cases(|tally| tally.completed > 0), 3),
        ("budgets shrunk in a step", cases(|tally| tally.shrinks > 0), 100),
        ("failures of that", cases(|tally| tally.spoilt > 0), 10),
        ("failed steps", cases(|tally| tally.failed_steps > 0), 100),
        ("lost steps", cases(|tally| tally.lost_steps > 0), 100),
        ("conflicts", cases(|tally| tally.conflicts > 0), 50),
        ("holds", cases(|tally| tally.holds > 0), 200),
        ("staged bytes", cases(|tally| tally.staged_bytes > 0), 300),
        ("waits for reads", cases(|tally| tally.host_waits > 0), 200),
        ("files cut in a step", cases(|tally| tally.cut_files > 0), 50),
        ("fetches on demand", cases(|tally| tally.on_demand > 0), 300),
    ] {
        assert!(count >= least, "only {count} cases have {what}");
    }
}

#[test]
#[ignore = "takes minutes; for changes to the schedule or the engine"]
fn every_computation_reads_its_own_bytes_in_many_more_cases() {
    for seed in CASES..10 * CASES {
        run(seed, None).unwrap_or_else(|error| panic!("case {seed}: {error}"));
    }
}

#[test]
fn every_mistake_is_noticed() {
    for mutant in [
        Mutant::DropWaitCopied,
        Mutant::DropWaitLastUse,
        Mutant::RecordEarly,
        Mutant::SlotShort,
        Mutant::SkipPage,
        Mutant::DropHandoff,
        Mutant::DropWaitSubmitted,
        Mutant::FreeBeforeEvent,
        Mutant::TrustPages,
        Mutant::ForgetOpen,
    ] {
        // A refused call would be noticed too; what counts is that the mistake itself, wrong bytes, is seen.
        let noticed = (0..200).any(|seed| matches!(run(seed, Some(mutant)), Err(Failure::Wrong(_))));
        assert!(noticed, "{mutant:?} went unnoticed");
    }
}

#[test]
fn pages_that_a_lower_budget_leaves_over_are_missed() {
    let kept = |seed| run(seed, Some(Mutant::KeepPages));
    assert!((0..200).any(|seed| matches!(kept(seed), Err(Failure::Left(_)))));
}
