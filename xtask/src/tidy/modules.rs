//! Modules of kernels: every source has one, made from what the source is now, in PTX that the oldest drivers take, for the oldest
//! device that the source names.

use super::{Finding, SourceFile};
use crate::codegen::kernels::{STAMP, digest, oldest};

/// The newest version of PTX that drivers of branch 570 take.
const VERSION: (u32, u32) = (8, 7);

/// Checks every folder that has sources of kernels.
pub fn check(files: &[SourceFile]) -> Vec<Finding> {
    let mut found = Vec::new();
    for source in files.iter().filter(|file| file.is("cu")) {
        let Some((stem, _)) = source.path.rsplit_once('.') else { continue };
        let path = format!("{stem}.ptx");
        match files.iter().find(|file| file.path == path) {
            Some(module) => found.extend(check_module(module, source, files)),
            None => {
                found.push(Finding::new(&source.path, 0, "has no PTX; run `cargo xtask codegen --write`"));
            }
        }
    }
    for module in files.iter().filter(|file| file.is("ptx")) {
        let source = module.path.replace(".ptx", ".cu");
        if !files.iter().any(|file| file.path == source) {
            found.push(Finding::new(&module.path, 0, "has no source beside it"));
        }
    }
    found
}

fn check_module(module: &SourceFile, source: &SourceFile, files: &[SourceFile]) -> Vec<Finding> {
    let mut found = Vec::new();
    let mut say = |message: String| found.push(Finding::new(&module.path, 0, message));
    let line = |start: &str| module.text.lines().find_map(|line| line.strip_prefix(start)).map(str::trim);
    let folder = |path: &str| path.rsplit_once('/').map(|(folder, _)| folder.to_owned());
    let beside = |file: &&SourceFile| file.is("cuh") && folder(&file.path) == folder(&source.path);
    // In the order of their names, as files are listed.
    let headers = files.iter().filter(beside).map(|file| file.text.as_str());
    let now = format!("{:016x}", digest(&source.text, headers));
    if line(STAMP) != Some(now.as_str()) {
        say("is not from what its sources are now; run `cargo xtask codegen --write`".into());
    }
    let version = line(".version ").and_then(|version| {
        let (major, minor) = version.split_once('.')?;
        Some((major.parse().ok()?, minor.parse().ok()?))
    });
    if version.is_none_or(|version: (u32, u32)| version > VERSION) {
        say(format!("is PTX {version:?}; drivers of branch 570 take {VERSION:?} at most"));
    }
    let target = line(".target ").and_then(|target| target.strip_prefix("sm_")?.parse::<u32>().ok());
    let oldest = oldest(&source.text);
    if target.is_none_or(|target| target > oldest) {
        say(format!("is made for {target:?}; sm_{oldest} at most is what its source is for"));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::super::fixture;
    use super::*;

    fn messages(version: &str, target: &str, changed: bool) -> Vec<String> {
        let stamp = digest("source", ["header"].into_iter());
        let text = format!("// a\n{STAMP}{stamp:016x}\n.version {version}\n.target {target}\n");
        let files = [
            fixture("k/a.cu", if changed { "source changed" } else { "source" }),
            fixture("k/a.cuh", "header"),
            fixture("k/a.ptx", &text),
            fixture("other/b.cuh", "not its header"),
        ];
        check(&files).into_iter().map(|finding| finding.message).collect()
    }

    #[test]
    fn a_module_in_sync_for_old_drivers_is_fine() {
        assert!(messages("8.7", "sm_75", false).is_empty());
        assert!(messages("8.0", "sm_70", false).is_empty());
    }

    #[test]
    fn newer_ptx_and_newer_targets_and_changed_sources_are_found() {
        assert!(messages("8.8", "sm_75", false)[0].contains("PTX"));
        assert!(messages("9.2", "sm_75", false)[0].contains("PTX"));
        assert!(messages("", "sm_75", false)[0].contains("PTX"));
        assert!(messages("8.7", "sm_90", false)[0].contains("made for"));
        assert!(messages("8.7", "sm_90a", false)[0].contains("made for"));
        assert!(messages("8.7", "sm_75", true)[0].contains("codegen --write"));
    }

    #[test]
    fn sources_and_modules_belong_together() {
        assert!(check(&[fixture("k/a.cu", "")])[0].message.contains("no PTX"));
        assert!(check(&[fixture("k/a.ptx", "")])[0].message.contains("no source"));
    }
}
