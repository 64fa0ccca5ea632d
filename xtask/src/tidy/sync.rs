//! Things said in two places must agree: versions, the README's Rust example, the Python package's types.

use super::{Finding, SourceFile};
use crate::workspace::Metadata;

const FACADE: &str = "crates/weightstream/src/lib.rs";
/// What the facade includes as its documentation, if it says so.
const FACADE_README: &str = "crates/weightstream/README.md";

/// Checks the pairs.
pub fn check(metadata: &Metadata, files: &[SourceFile]) -> Vec<Finding> {
    let mut found = versions(metadata, files);
    found.extend(readme_example(files));
    found.extend(python_types(files));
    found
}

fn text<'a>(files: &'a [SourceFile], path: &str) -> Option<&'a str> {
    files.iter().find(|file| file.path == path).map(|file| file.text.as_str())
}

/// One version: every crate's, the changelog's newest, and the Python project's unless it takes the crates'.
fn versions(metadata: &Metadata, files: &[SourceFile]) -> Vec<Finding> {
    let mut found = Vec::new();
    let Some(version) = metadata.packages.first().map(|package| package.version.as_str()) else {
        return found;
    };
    for package in metadata.packages.iter().filter(|package| package.version != version) {
        let message = format!("{} is {}, the workspace {version}", package.name, package.version);
        found.push(Finding::new("Cargo.toml", 0, message));
    }
    let newest =
        text(files, "CHANGELOG.md").and_then(|log| log.lines().find_map(|line| line.strip_prefix("## ")));
    if newest.and_then(|heading| heading.split_whitespace().next()) != Some(version) {
        found.push(Finding::new("CHANGELOG.md", 0, format!("its first heading is not `## {version}`")));
    }
    if let Some(project) = text(files, "pyproject.toml") {
        let stated = project.lines().find_map(|line| line.strip_prefix("version = "));
        let agrees = match stated {
            Some(stated) => stated.trim().trim_matches('"') == version,
            None => {
                project.lines().any(|line| line.starts_with("dynamic = ") && line.contains("\"version\""))
            }
        };
        if !agrees {
            found.push(Finding::new("pyproject.toml", 0, format!("its version is not {version}")));
        }
    }
    found
}

/// The facade's crate example is shown, word for word, in the README.
fn readme_example(files: &[SourceFile]) -> Option<Finding> {
    let facade = text(files, FACADE)?;
    let (origin, docs) = if facade.starts_with("#![doc = include_str!(\"../README.md\")]") {
        (FACADE_README, text(files, FACADE_README)?.lines().collect())
    } else {
        (FACADE, crate_docs(facade))
    };
    let example = example(&docs)?;
    let readme = text(files, "README.md").unwrap_or_default();
    let shown = blocks(readme.lines(), "```rust").contains(&example);
    (!shown).then(|| {
        Finding::new("README.md", 0, format!("no ```rust block equals the example that opens {origin}"))
    })
}

/// The lines of a crate's documentation.
fn crate_docs(source: &str) -> Vec<&str> {
    let docs =
        source.lines().take_while(|line| line.starts_with("//!")).map(|line| line.trim_start_matches("//!"));
    docs.map(|line| line.strip_prefix(' ').unwrap_or(line)).collect()
}

/// The first code block of a documentation that is compiled, less the lines rustdoc hides.
fn example(docs: &[&str]) -> Option<String> {
    let docs = docs.iter().copied().filter(|line| *line != "#" && !line.starts_with("# "));
    let plain = blocks(docs.clone(), "```").into_iter().next();
    blocks(docs, "```rust").into_iter().next().or(plain)
}

/// The code blocks whose fence is exactly `fence`.
fn blocks<'a>(lines: impl Iterator<Item = &'a str>, fence: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut open: Option<(bool, String)> = None;
    for line in lines {
        match &mut open {
            Some((wanted, block)) if line.trim() == "```" => {
                if *wanted {
                    found.push(std::mem::take(block));
                }
                open = None;
            }
            Some((_, block)) => {
                block.push_str(line);
                block.push('\n');
            }
            None if line.starts_with("```") => open = Some((line.trim() == fence, String::new())),
            None => {}
        }
    }
    found
}

/// A typed package says so and describes its native module.
fn python_types(files: &[SourceFile]) -> Vec<Finding> {
    if text(files, "python/weightstream/__init__.py").is_none() {
        return Vec::new();
    }
    let needed = ["python/weightstream/py.typed", "python/weightstream/_native.pyi"];
    let missing = needed.into_iter().filter(|path| text(files, path).is_none());
    missing.map(|path| Finding::new(path, 0, "is missing: the package is typed")).collect()
}

#[cfg(test)]
mod tests {
    use super::super::fixture;
    use super::*;
    use crate::workspace::Package;

    fn metadata(versions: &[&str]) -> Metadata {
        let package = |version: &&str| Package {
            name: "a".into(),
            version: (*version).into(),
            dependencies: Vec::new(),
            targets: Vec::new(),
        };
        Metadata { packages: versions.iter().map(package).collect() }
    }

    #[test]
    fn one_version_everywhere() {
        let log = fixture("CHANGELOG.md", "# Changelog\n\n## 0.1.0 (unreleased)\n");
        let dynamic = fixture("pyproject.toml", "[project]\ndynamic = [\"version\"]\n");
        let stated = |v: &str| fixture("pyproject.toml", &format!("[project]\nversion = \"{v}\"\n"));
        assert!(versions(&metadata(&["0.1.0"]), &[log.clone(), dynamic.clone()]).is_empty());
        assert!(versions(&metadata(&["0.1.0"]), &[log.clone(), stated("0.1.0")]).is_empty());
        assert_eq!(versions(&metadata(&["0.1.0"]), &[log.clone(), stated("0.2.0")]).len(), 1);
        assert_eq!(versions(&metadata(&["0.1.0", "0.2.0"]), &[log.clone(), dynamic.clone()]).len(), 1);
        assert_eq!(versions(&metadata(&["0.2.0"]), &[log, dynamic]).len(), 1);
    }

    #[test]
    fn the_readme_shows_the_crate_example() {
        let lib = fixture(
            FACADE,
            "//! Runs.\n//!\n//! ```text\n//! a picture\n//! ```\n//! ```\n//! # use hidden;\n//! let a = 1;\n//!\n//! let b = 2;\n//! ```\nmod a;\n",
        );
        let same = fixture("README.md", "# A\n```rust\nlet a = 1;\n\nlet b = 2;\n```\n");
        let other = fixture("README.md", "# A\n```rust\nlet a = 2;\n```\n");
        assert_eq!(readme_example(&[lib.clone(), same]), None);
        assert!(readme_example(&[lib.clone(), other]).is_some());
        assert!(readme_example(&[lib]).is_some());
        assert_eq!(readme_example(&[fixture(FACADE, "//! Runs.\n")]), None);
        let including = fixture(FACADE, "#![doc = include_str!(\"../README.md\")]\n");
        let included = fixture(FACADE_README, "# A\n\n```rust\nlet a = 3;\n# Ok(())\n```\n");
        let shown = fixture("README.md", "# A\n```rust\nlet a = 3;\n```\n");
        assert_eq!(readme_example(&[including.clone(), included.clone(), shown]), None);
        assert!(readme_example(&[including, included]).is_some());
    }

    #[test]
    fn a_typed_package_has_its_stubs() {
        let init = fixture("python/weightstream/__init__.py", "");
        let typed = fixture("python/weightstream/py.typed", "");
        let stub = fixture("python/weightstream/_native.pyi", "");
        assert_eq!(python_types(std::slice::from_ref(&init)).len(), 2);
        assert!(python_types(&[init, typed, stub]).is_empty());
    }
}
