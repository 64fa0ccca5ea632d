//! Where `unsafe` may stand, and what must stand above it. Clippy checks the comments of what it compiles; this rule
//! sees every file, and knows which crates own raw memory.

use super::{Finding, SourceFile};

/// Crates that own raw memory.
const CRATES: &[&str] = &["gpu-driver", "vmm-alloc", "pinned-pool"];
/// Folders and files of other crates that speak C, or launch what does.
const FILES: &[&str] = &[
    "crates/py-bindings/src/allocations.rs",
    "crates/py-bindings/src/dlpack",
    "crates/py-bindings/src/kernels.rs",
    "crates/checkpoint/src/mapping/",
    "crates/checkpoint/src/io/uring.rs",
    "crates/quant-kernels/src/kernels.rs",
];
/// How far above an unsafe operation its reason may stand: a statement's lines and its comment's.
const REACH: usize = 12;

/// Checks every Rust file.
pub fn check(files: &[SourceFile]) -> Vec<Finding> {
    files.iter().filter(|file| file.is("rs")).flat_map(check_file).collect()
}

fn check_file(file: &SourceFile) -> Vec<Finding> {
    let lines: Vec<_> = file.text.lines().collect();
    let mut found = Vec::new();
    for (index, line) in lines.iter().enumerate() {
        let code = code_of(line);
        if !has_word(&code, "unsafe") {
            continue;
        }
        if !may_be_unsafe(file) && !calls_only(file) {
            let message = format!("`unsafe` outside {} and {}", CRATES.join(", "), FILES.join(", "));
            found.push(Finding::new(&file.path, index + 1, message));
        }
        let needs_reason = code.contains("unsafe {") || code.contains("unsafe impl");
        if needs_reason && !calls_only(file) && !reasoned(&lines, index) {
            found.push(Finding::new(&file.path, index + 1, "no `// SAFETY:` comment above this"));
        }
    }
    found
}

fn may_be_unsafe(file: &SourceFile) -> bool {
    file.package().is_some_and(|package| CRATES.contains(&package))
        || FILES.iter().any(|allowed| file.path.starts_with(allowed))
}

/// Tests, examples and benches of a crate with an unsafe public function have to call it. Clippy looks after them.
fn calls_only(file: &SourceFile) -> bool {
    file.path.starts_with("crates/")
        && ["/tests/", "/examples/", "/benches/"].iter().any(|f| file.path.contains(f))
}

/// A line without its comment and without what its string literals hold.
fn code_of(line: &str) -> String {
    let mut code = String::new();
    let (mut quoted, mut escaped) = (false, false);
    for part in line.replace("'\"'", "''").chars() {
        match part {
            '"' if !escaped => quoted = !quoted,
            _ if !quoted => code.push(part),
            _ => {}
        }
        escaped = part == '\\' && !escaped;
    }
    code.split("//").next().unwrap_or_default().to_owned()
}

fn has_word(code: &str, word: &str) -> bool {
    let letter = |c: char| c.is_alphanumeric() || c == '_';
    code.match_indices(word).any(|(at, _)| {
        let before = code[..at].chars().next_back().is_some_and(letter);
        let after = code[at + word.len()..].chars().next().is_some_and(letter);
        !before && !after
    })
}

/// Whether a comment says why: on the line, or above it within the same statement.
fn reasoned(lines: &[&str], index: usize) -> bool {
    if lines[index].contains("SAFETY:") {
        return true;
    }
    for line in lines[..index].iter().rev().take(REACH) {
        let line = line.trim();
        if line.contains("SAFETY:") {
            return true;
        }
        let comment = line.starts_with("//") || line.starts_with("#[");
        if line.is_empty() || (!comment && line.ends_with([';', '}'])) {
            return false;
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::super::fixture;
    use super::*;

    fn count(path: &str, text: &str) -> usize {
        check(&[fixture(path, text)]).len()
    }

    #[test]
    fn only_the_crates_that_own_memory_may() {
        let text = "// SAFETY: the caller keeps it alive.\nlet a = unsafe { b() };\n";
        assert_eq!(count("crates/vmm-alloc/src/a.rs", text), 0);
        assert_eq!(count("crates/py-bindings/src/dlpack.rs", text), 0);
        assert_eq!(count("crates/weightstream/tests/a.rs", "let a = unsafe { b() };\n"), 0);
        assert_eq!(count("crates/offload-core/src/a.rs", text), 1);
        assert_eq!(count("xtask/src/a.rs", text), 1);
        assert_eq!(count("crates/offload-core/src/a.rs", "#![forbid(unsafe_code)]\n// no unsafe here\n"), 0);
    }

    #[test]
    fn every_block_says_why() {
        let path = "crates/vmm-alloc/src/a.rs";
        assert_eq!(count(path, "let a = unsafe { b() };\n"), 1);
        assert_eq!(count(path, "unsafe impl Send for A {}\n"), 1);
        assert_eq!(count(path, "// SAFETY: owned here.\nlet a = c\n    .map(|d| unsafe { b(d) });\n"), 0);
        assert_eq!(count(path, "// SAFETY: owned here.\nlet a = 1;\nlet b = unsafe { c() };\n"), 1);
        assert_eq!(count(path, "pub unsafe fn a() {}\n"), 0);
        assert_eq!(count("xtask/src/a.rs", "let a = (\"unsafe { b }\", 1); // unsafe\n"), 0);
    }
}
