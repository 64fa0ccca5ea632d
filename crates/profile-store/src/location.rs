//! Where profiles are: `DDO_PROFILE_DIR`, read at each call, or `.ddo/profiles` in the user's home folder.

use std::env;
use std::path::PathBuf;

use crate::error::{Result, StoreError};

/// The variable that names another folder.
pub const VARIABLE: &str = "DDO_PROFILE_DIR";

/// The folder of profiles, now.
pub fn default_folder() -> Result<PathBuf> {
    folder_of(env::var_os(VARIABLE).map(PathBuf::from), env::home_dir())
}

/// The folder that the variable names, unless it is empty, or the one below the home folder.
fn folder_of(named: Option<PathBuf>, home: Option<PathBuf>) -> Result<PathBuf> {
    let some = |path: &PathBuf| !path.as_os_str().is_empty();
    if let Some(named) = named.filter(some) {
        return Ok(match (named.strip_prefix("~"), home) {
            (Ok(rest), Some(home)) => home.join(rest),
            _ => named,
        });
    }
    let home = home.filter(some).ok_or(StoreError::NoHome)?;
    Ok(home.join(".ddo").join("profiles"))
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "tests")]
    use super::*;

    #[test]
    fn the_variable_wins_over_the_home_folder() {
        let home = || Some(PathBuf::from("/h"));
        assert_eq!(folder_of(None, home()).unwrap(), PathBuf::from("/h/.ddo/profiles"));
        assert_eq!(folder_of(Some("".into()), home()).unwrap(), PathBuf::from("/h/.ddo/profiles"));
        assert_eq!(folder_of(Some("/p".into()), None).unwrap(), PathBuf::from("/p"));
        assert_eq!(folder_of(Some("~/p".into()), home()).unwrap(), PathBuf::from("/h/p"));
        assert!(matches!(folder_of(None, None), Err(StoreError::NoHome)));
        assert!(matches!(folder_of(None, Some("".into())), Err(StoreError::NoHome)));
    }
}
