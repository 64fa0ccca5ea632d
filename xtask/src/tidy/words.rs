//! Words that do not belong in a public repository: package hosts, folders of one machine, private notes.

use super::{Finding, SourceFile};

/// Files made by tools, which name what they must.
const GENERATED: &[&str] = &["Cargo.lock"];

// Written in two halves so that this file does not find itself.
const FORBIDDEN: &[(&str, &str)] = &[
    (concat!("pypi", ".org"), "a package host"),
    (concat!("python", "hosted.org"), "a package host"),
    (concat!("static.crates", ".io"), "a package host"),
    (concat!("index.crates", ".io"), "a package host"),
    (concat!("registry.npm", "js"), "a package host"),
    (concat!("download.pytorch", ".org"), "a package host"),
    (concat!("/ro", "ot/"), "a folder of one machine"),
    (concat!("/ho", "me/"), "a folder of one machine"),
    (concat!("/Us", "ers/"), "a folder of one machine"),
    (concat!("/wo", "rk/"), "a folder of one machine"),
    (concat!("/tmp/", "ws"), "a folder of one machine"),
    (concat!("shared/", "design"), "a note outside the repository"),
    (concat!("shared/", "style"), "a note outside the repository"),
    (concat!("shared/", "facts"), "a note outside the repository"),
    (concat!("shared/", "cases"), "a note outside the repository"),
    (concat!("shared/", "bench"), "a note outside the repository"),
    (concat!("shared/", "reference"), "a note outside the repository"),
    (concat!("cases/", "open.md"), "a note outside the repository"),
    (concat!("design", ".md"), "a note outside the repository"),
];

/// Checks every file, line by line.
pub fn check(files: &[SourceFile]) -> Vec<Finding> {
    let mut found = Vec::new();
    for file in files.iter().filter(|file| !GENERATED.contains(&file.path.as_str())) {
        for (index, line) in file.text.lines().enumerate() {
            for (word, what) in FORBIDDEN {
                if line.contains(word) {
                    found.push(Finding::new(&file.path, index + 1, format!("names {what}: {word}")));
                }
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::super::fixture;
    use super::*;

    #[test]
    fn each_forbidden_word_is_found_wherever_it_stands() {
        for (word, what) in FORBIDDEN {
            let found = check(&[fixture("README.md", &format!("fine\nsee {word} there\n"))]);
            assert!(found.iter().any(|f| f.line == 2 && f.message.contains(what)), "{word}");
        }
        assert!(check(&[fixture("a.md", "docs.rs/pyo3 and /dev/shm/a, a shared/owned pair\n")]).is_empty());
    }

    #[test]
    fn lock_files_name_their_registry() {
        let text = format!("source = \"{}\"\n", FORBIDDEN[3].0);
        assert!(check(&[fixture("Cargo.lock", &text)]).is_empty());
    }
}
