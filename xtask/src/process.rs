//! Running other programs: said aloud before they start, their failure an error that names them.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader};
use std::process::{Command, ExitStatus, Stdio};

use anyhow::{Context, Result, bail};

/// The command line as a person would type it.
pub fn display(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(quoted).collect::<Vec<_>>().join(" ")
}

fn quoted(word: &OsStr) -> String {
    let word = word.to_string_lossy();
    if word.is_empty() || word.contains([' ', '"', '*', '(', ')']) {
        format!("'{word}'")
    } else {
        word.into_owned()
    }
}

/// Runs a command with our own output streams; an exit status other than zero is an error.
pub fn run(command: &mut Command) -> Result<()> {
    let status = status(command)?;
    if !status.success() {
        bail!("`{}` failed: {status}", display(command));
    }
    Ok(())
}

/// Runs a command with our own output streams and gives its exit status back.
pub fn status(command: &mut Command) -> Result<ExitStatus> {
    eprintln!("$ {}", display(command));
    command.status().with_context(|| format!("cannot start `{}`", display(command)))
}

/// Runs a command silently and gives its standard output back.
pub fn capture(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("cannot start `{}`", display(command)))?;
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr);
        bail!("`{}` failed: {}\n{}", display(command), output.status, text.trim());
    }
    String::from_utf8(output.stdout).context("its output is not UTF-8")
}

/// Runs a command, passing its standard output through line by line and showing each line to `see`.
pub fn tee(command: &mut Command, mut see: impl FnMut(&str)) -> Result<()> {
    eprintln!("$ {}", display(command));
    let mut child = command
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start `{}`", display(command)))?;
    let lines = BufReader::new(child.stdout.take().context("its output was not piped")?);
    for line in lines.split(b'\n') {
        let line = line?;
        let line = String::from_utf8_lossy(&line);
        println!("{line}");
        see(&line);
    }
    let status = child.wait()?;
    if !status.success() {
        bail!("`{}` failed: {status}", display(command));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failing_command_is_an_error_that_names_it() {
        let error = run(&mut Command::new("false")).unwrap_err().to_string();
        assert!(error.contains("`false` failed"), "{error}");
        let error = capture(Command::new("sh").args(["-c", "echo why >&2; exit 3"])).unwrap_err().to_string();
        assert!(error.contains("why") && error.contains('3'), "{error}");
    }

    #[test]
    fn tee_shows_every_line_and_the_failure() {
        let mut seen = Vec::new();
        let outcome =
            tee(Command::new("sh").args(["-c", "echo one; echo two; exit 1"]), |l| seen.push(l.to_owned()));
        assert!(outcome.is_err());
        assert_eq!(seen, ["one", "two"]);
    }
}
