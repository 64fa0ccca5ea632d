//! Any bytes as a file of timings: what is accepted is a sound tree, comes back from its own JSON, and can be exported, merged
//! and compared.

use startup_timing::{
    Part, Report, RunSet, chrome_trace, diff, folded_stacks, merge, read_bytes, stats, table, to_json,
};

/// Panics if anything is wrong.
pub(crate) fn run(data: &[u8]) {
    let Ok(report) = read_bytes(data, "fuzz") else { return };
    sound(&report);
    let json = to_json(&report).unwrap_or_else(|error| panic!("{error}"));
    let again = read_bytes(json.as_bytes(), "again").unwrap_or_else(|error| panic!("{error}"));
    // Seconds are exact up to 26 days.
    if report.duration < 1 << 51 {
        assert_eq!(again.phases, report.phases);
    }
    for text in [chrome_trace(&report), folded_stacks(&report), table(&report).map(|table| table.to_string())]
    {
        assert!(text.is_ok());
    }
    let part = || Part { file: "a".into(), report: Ok(report.clone()) };
    let merged = merge(vec![part(), part()]).unwrap_or_else(|error| panic!("{error}"));
    sound(&merged);
    let mut set = RunSet::new();
    assert!(set.add(&report).is_ok());
    if set.runs() == 1 {
        assert!(stats(&set, 0.95).is_ok() && diff(&set, &set, 0.99, 0.0).is_ok());
    }
}

/// Children lie inside their parents, up to the rounding of seconds in files that others wrote, and times add up.
fn sound(report: &Report) {
    for phase in &report.phases {
        let Some(parent) = phase.parent else { continue };
        assert!(parent < phase.id);
        let parent = &report.phases[parent.0 as usize - 1];
        assert!(parent.start <= phase.start + 1_000 && phase.end() <= parent.end() + 1_000);
    }
    let analysis = report.analysis().unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(analysis.walk().len(), report.phases.len());
}
