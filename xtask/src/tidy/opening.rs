//! How a file looks: it opens by saying what it owns, is not too long, and has no stray white space.

use super::{Finding, SourceFile};

/// Lines at which a file is listed.
pub const THINK: usize = 400;
/// Lines at which it is refused.
const SPLIT: usize = 600;

/// Folders of files that are right or wrong byte by byte.
const DATA: &[&str] = &["/tests/corpus/", "/fuzz/corpus/"];

/// Source files that are long but not yet refused, with their number of lines.
pub fn long_files(files: &[SourceFile]) -> Vec<(&str, usize)> {
    let lines = files.iter().filter(|f| is_source(f)).map(|f| (f.path.as_str(), f.text.lines().count()));
    lines.filter(|(_, lines)| (THINK + 1..=SPLIT).contains(lines)).collect()
}

/// Checks each file on its own.
pub fn check(files: &[SourceFile]) -> Vec<Finding> {
    files
        .iter()
        .flat_map(|file| [opens(file), length(file)].into_iter().flatten().chain(white_space(file)))
        .collect()
}

fn is_source(file: &SourceFile) -> bool {
    file.is("rs") || file.is("py")
}

fn opens(file: &SourceFile) -> Option<Finding> {
    let first = file.text.lines().map(str::trim).find(|line| !line.is_empty() && !line.starts_with("#!/"));
    let first = first.unwrap_or_default();
    let (opened, wanted) = if file.is("rs") {
        (first.starts_with("//!") || first.starts_with("#![doc = include_str!("), "`//!`")
    } else if file.is("py") {
        (first.starts_with("\"\"\"") || first.starts_with("r\"\"\""), "a docstring")
    } else {
        return None;
    };
    (!opened)
        .then(|| Finding::new(&file.path, 1, format!("opens without {wanted} that says what the file owns")))
}

fn length(file: &SourceFile) -> Option<Finding> {
    let lines = file.text.lines().count();
    (is_source(file) && lines > SPLIT)
        .then(|| Finding::new(&file.path, 0, format!("has {lines} lines; split files above {SPLIT}")))
}

fn white_space(file: &SourceFile) -> Vec<Finding> {
    if !is_source(file) && DATA.iter().any(|folder| file.path.contains(folder)) {
        return Vec::new();
    }
    let mut found: Vec<_> = file
        .text
        .split('\n')
        .enumerate()
        .filter(|(_, line)| line.ends_with([' ', '\t', '\r']))
        .map(|(index, _)| Finding::new(&file.path, index + 1, "ends in white space"))
        .collect();
    if !file.text.is_empty() && (!file.text.ends_with('\n') || file.text.ends_with("\n\n")) {
        let last = file.text.lines().count();
        found.push(Finding::new(&file.path, last, "does not end in exactly one line feed"));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::super::fixture;
    use super::*;

    fn messages(path: &str, text: &str) -> Vec<String> {
        check(&[fixture(path, text)]).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn every_source_file_opens_with_its_purpose() {
        assert_eq!(messages("a.rs", "//! Owns a.\nuse b;\n"), [""; 0]);
        assert!(messages("a.rs", "use b;\n")[0].contains("`//!`"));
        assert_eq!(messages("a.py", "#!/usr/bin/env python3\n\"\"\"Owns a.\"\"\"\n"), [""; 0]);
        assert!(messages("a.py", "import b\n")[0].contains("docstring"));
        assert!(messages("a.py", "")[0].contains("docstring"));
        assert_eq!(messages("a.toml", "[a]\n"), [""; 0]);
    }

    #[test]
    fn long_files_are_listed_and_longer_ones_refused() {
        let lines = |n: usize| fixture("a.rs", &"//! Owns a.\n".repeat(n));
        assert!(long_files(&[lines(400)]).is_empty());
        assert_eq!(long_files(&[lines(401)]), [("a.rs", 401)]);
        assert!(check(&[lines(600)]).is_empty());
        assert!(check(&[lines(601)])[0].message.contains("601 lines"));
    }

    #[test]
    fn white_space_at_line_ends_is_found() {
        assert_eq!(
            messages("a.md", "one \ntwo\t\n"),
            ["a.md:1: ends in white space", "a.md:2: ends in white space"]
        );
        assert_eq!(messages("a.md", "one").len(), 1);
        assert_eq!(messages("a.md", "one\n\n").len(), 1);
        assert_eq!(messages("a.md", "one\n"), [""; 0]);
    }

    #[test]
    fn files_that_tests_read_may_end_as_they_like() {
        assert_eq!(messages("crates/a/tests/corpus/web-page.safetensors", "<html> "), [""; 0]);
        assert_eq!(messages("crates/a/fuzz/corpus/b/c", "{}\n\n"), [""; 0]);
        assert_eq!(messages("crates/a/tests/corpus/make.py", "\"\"\"Owns a.\"\"\" \n").len(), 1);
        assert_eq!(messages("crates/a/tests/b.json", "{} ").len(), 2);
    }
}
