//! Any bytes as a record's file: reading never panics, what was read can be written, and what was written reads the same, without
//! a notice, as JSON that has nothing bad in it.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::time::Duration;

use profile_store::folder::{Content, Folder};
use profile_store::rules::PROFILE;
use profile_store::{Identity, Json, Store, StoreError};

/// A folder of one process, in memory.
#[derive(Default)]
struct Memory(RefCell<BTreeMap<String, Vec<u8>>>);

impl Folder for Memory {
    type Lock = ();

    fn prepare(&self) -> io::Result<()> {
        Ok(())
    }
    fn lock(&self, _: Duration) -> io::Result<Option<()>> {
        Ok(Some(()))
    }
    fn read(&self, name: &str, _: u64) -> io::Result<Content> {
        Ok(self.0.borrow().get(name).map_or(Content::Missing, |bytes| Content::Bytes(bytes.clone())))
    }
    fn write_new(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        self.0.borrow_mut().insert(name.into(), bytes.to_vec());
        Ok(())
    }
    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        let bytes = self.0.borrow_mut().remove(from).ok_or(io::ErrorKind::NotFound)?;
        self.0.borrow_mut().insert(to.into(), bytes);
        Ok(())
    }
    fn remove(&self, name: &str) -> io::Result<()> {
        self.0.borrow_mut().remove(name).map(drop).ok_or_else(|| io::ErrorKind::NotFound.into())
    }
    fn names(&self) -> io::Result<Vec<String>> {
        Ok(self.0.borrow().keys().cloned().collect())
    }
    fn sync(&self) -> io::Result<()> {
        Ok(())
    }
    fn path(&self) -> &Path {
        Path::new("memory")
    }
}

/// Panics if anything is wrong.
pub(crate) fn run(data: &[u8]) {
    if let Ok(value) = Json::parse(data)
        && value.flaw().is_none()
    {
        let Ok(again) = Json::parse(value.pretty().as_bytes()) else { panic!("what was written is no JSON") };
        assert_eq!(again.canonical(), value.canonical());
    }
    let Ok(identity) = Identity::named("fuzz", "Model") else { panic!("a plain identity was refused") };
    let memory = Memory::default();
    memory.0.borrow_mut().insert(identity.file_name(), data.to_vec());
    let store = Store::new(memory, PROFILE);
    let first = store.load(&identity);
    let names = |loaded: &profile_store::Loaded| {
        loaded.record.iter().flat_map(|record| record.names().map(str::to_owned)).collect::<Vec<_>>()
    };
    match store.update(&identity, |_| Ok(())) {
        Ok(_) => {}
        Err(StoreError::Newer { .. } | StoreError::TooLarge { .. }) => return,
        Err(error) => panic!("an update failed: {error}"),
    }
    let second = store.load(&identity);
    assert_eq!(names(&first), names(&second));
    assert!(
        second.notices.iter().all(|notice| notice.to_string().contains("version")),
        "{:?}",
        second.notices
    );
    let Some(record) = second.record else { panic!("nothing is there after an update") };
    let Ok(root) = Json::parse(record.to_json().as_bytes()) else { panic!("the record is no JSON") };
    assert_eq!(root.flaw(), None);
}
