//! One file's content: an identity, entries by name, and whatever else a newer or another program wrote there.

use std::collections::BTreeMap;

use crate::error::{About, Notice, Result, StoreError};
use crate::identity::Identity;
use crate::json::Json;
use crate::rules::{Kind, VERSION, Verdict, judge};

/// How many damaged entries are kept beside the good ones.
const SET_ASIDE: usize = 16;
/// How much of a damaged entry is kept, in bytes.
const SET_ASIDE_TEXT: usize = 4096;
/// The names that this version knows at the top of a file.
const KNOWN: [&str; 6] = ["schema_version", "key", "identity", "updated_at", "entries", "set_aside"];

/// The entries of one identity.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    identity: Identity,
    kinds: &'static [Kind],
    version: u64,
    updated_at: Option<String>,
    entries: BTreeMap<String, Entry>,
    extra: Vec<(String, Json)>,
    set_aside: Vec<(String, Json)>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Entry {
    value: Json,
    understood: bool,
}

/// What the bytes of a file are.
#[derive(Debug)]
pub(crate) enum Decoded {
    /// A record, and what was wrong with parts of it.
    Record(Record, Vec<Notice>),
    /// A file of a newer version in a shape that is not known.
    Newer(u64),
    /// There is no file.
    Missing,
    /// No record, and why.
    Bad(String),
}

impl PartialEq for Kind {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl Eq for Kind {}

impl Record {
    /// A record without entries.
    pub(crate) fn empty(identity: &Identity, kinds: &'static [Kind]) -> Self {
        Self {
            identity: identity.clone(),
            kinds,
            version: VERSION,
            updated_at: None,
            entries: BTreeMap::new(),
            extra: Vec::new(),
            set_aside: Vec::new(),
        }
    }

    /// Whose record it is.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// When it was last written, as ISO 8601 in UTC.
    pub fn updated_at(&self) -> Option<&str> {
        self.updated_at.as_deref()
    }

    /// The entries of a kind that are understood, by name.
    pub fn of_kind<'a>(&'a self, kind: &'a str) -> impl Iterator<Item = (&'a str, &'a Json)> {
        let good = self.entries.iter().filter(|(_, entry)| entry.understood);
        good.map(|(name, entry)| (name.as_str(), &entry.value))
            .filter(move |(_, value)| value.get("kind").and_then(Json::as_text) == Some(kind))
    }

    /// An entry, if it is there and understood.
    pub fn get(&self, name: &str) -> Option<&Json> {
        self.entries.get(name).filter(|entry| entry.understood).map(|entry| &entry.value)
    }

    /// The names of all entries, also of those that are not understood.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    /// Puts an entry in place of the one of that name, whose fields that no table knows are kept. An entry of a newer version is
    /// never replaced.
    pub fn put(&mut self, name: &str, entry: Json) -> Result<()> {
        let refused = |reason: String| StoreError::Refused { what: format!("the entry {name:?}"), reason };
        match judge(self.kinds, &entry) {
            Verdict::Good => {}
            Verdict::Opaque => return Err(refused("its kind or version is not known to this store".into())),
            Verdict::Bad(reason) => return Err(refused(reason)),
        }
        let mut entry = entry;
        if let Some(old) = self.entries.get(name) {
            if !old.understood {
                return Err(refused("the one that is there was written by a newer program".into()));
            }
            self.carry_over(&old.value, &mut entry);
        }
        self.set_aside.retain(|(own, _)| own != name);
        self.entries.insert(name.to_owned(), Entry { value: entry, understood: true });
        Ok(())
    }

    /// Brings fields that no table knows from an entry into the one of the same kind that replaces it.
    fn carry_over(&self, old: &Json, new: &mut Json) {
        if old.get("kind") != new.get("kind") {
            return;
        }
        let kind = new.get("kind").and_then(Json::as_text);
        let Some(kind) = self.kinds.iter().find(|own| Some(own.name) == kind) else { return };
        let own = |name: &str| {
            name == "kind" || name == "version" || kind.fields.iter().any(|field| field.name == name)
        };
        let (Json::Object(old), Json::Object(members)) = (old, new) else { return };
        for (name, value) in old.iter().filter(|(name, _)| !own(name)) {
            if !members.iter().any(|(there, _)| there == name) {
                members.push((name.clone(), value.clone()));
            }
        }
    }

    /// Takes an entry out, if it is understood.
    pub fn remove(&mut self, name: &str) {
        if self.entries.get(name).is_some_and(|entry| entry.understood) {
            self.entries.remove(name);
        }
    }

    pub(crate) fn stamp(&mut self, now: String) {
        self.updated_at = Some(now);
    }

    /// Reads a file's bytes.
    pub(crate) fn decode(bytes: &[u8], identity: &Identity, kinds: &'static [Kind]) -> Decoded {
        let root = match Json::parse(bytes) {
            Ok(root) => root,
            Err(refusal) => return Decoded::Bad(format!("{}, at byte {}", refusal.reason, refusal.at)),
        };
        let Some(members) = root.members() else {
            return Decoded::Bad(format!("it holds a value of type {}, not an object", root.kind()));
        };
        let version = match root.get("schema_version").map(Json::as_u64) {
            Some(Some(version)) if version > 0 => version,
            Some(_) => return Decoded::Bad("its schema_version is no whole number from 1 on".into()),
            None => return Decoded::Bad("it has no schema_version".into()),
        };
        let bad = |reason: &str| {
            if version > VERSION { Decoded::Newer(version) } else { Decoded::Bad(reason.into()) }
        };
        if root.get("key").and_then(Json::as_text) != Some(identity.key()) {
            return bad("its key is not that of its name: it belongs to another identity");
        }
        let same = root.get("identity").and_then(|value| Identity::of(value.clone()).ok());
        if same.as_ref().map(Identity::key) != Some(identity.key()) {
            return bad("its identity is damaged or another's");
        }
        let Some(entries) = root.get("entries").and_then(Json::members) else {
            return bad("it has no object of entries");
        };
        let mut record = Self::empty(identity, kinds);
        let mut notices = Vec::new();
        if version > VERSION {
            let reason = "newer than this program; what is understood of it was read".into();
            notices.push(Notice { about: About::Version { version }, reason });
        }
        record.version = version;
        record.updated_at = root.get("updated_at").and_then(Json::as_text).map(str::to_owned);
        for (name, kept) in root.get("set_aside").and_then(Json::members).unwrap_or_default() {
            if kept.flaw().is_none() {
                record.keep_aside(name.clone(), kept.clone());
            }
        }
        for (name, value) in entries {
            record.read_entry(name, value, &mut notices);
        }
        for (name, value) in members.iter().filter(|(name, _)| !KNOWN.contains(&name.as_str())) {
            match value.flaw() {
                None => {
                    record.extra.retain(|(own, _)| own != name);
                    record.extra.push((name.clone(), value.clone()));
                }
                Some(reason) => record.damaged(&format!("/{name}"), value, reason, &mut notices),
            }
        }
        Decoded::Record(record, notices)
    }

    fn read_entry(&mut self, name: &str, value: &Json, notices: &mut Vec<Notice>) {
        let understood = match judge(self.kinds, value) {
            Verdict::Good => true,
            Verdict::Opaque => false,
            Verdict::Bad(reason) => return self.damaged(name, value, reason, notices),
        };
        let entry = Entry { value: value.clone(), understood };
        if self.entries.insert(name.to_owned(), entry).is_some() {
            let reason = "its name is there twice; the last was taken".into();
            notices.push(Notice { about: About::Entry { name: name.to_owned() }, reason });
        }
    }

    fn damaged(&mut self, name: &str, value: &Json, reason: String, notices: &mut Vec<Notice>) {
        let mut text = value.canonical();
        let end = (0..=SET_ASIDE_TEXT.min(text.len())).rev().find(|&at| text.is_char_boundary(at));
        text.truncate(end.unwrap_or(0));
        let kept = Json::object([("reason", Json::text(reason.as_str())), ("text", Json::Text(text))]);
        self.keep_aside(name.to_owned(), kept);
        notices.push(Notice { about: About::Entry { name: name.to_owned() }, reason });
    }

    fn keep_aside(&mut self, name: String, kept: Json) {
        self.set_aside.retain(|(own, _)| *own != name);
        self.set_aside.push((name, kept));
        if self.set_aside.len() > SET_ASIDE {
            self.set_aside.remove(0);
        }
    }

    /// The text of the file.
    pub(crate) fn encode(&self) -> String {
        let entries = self.entries.iter().map(|(name, entry)| (name.as_str(), entry.value.clone()));
        let mut root = vec![
            ("schema_version".to_owned(), Json::Number(self.version.to_string())),
            ("key".to_owned(), Json::text(self.identity.key())),
            ("identity".to_owned(), self.identity.value().clone()),
            ("entries".to_owned(), Json::object(entries)),
        ];
        root.extend(self.updated_at.iter().map(|time| ("updated_at".to_owned(), Json::text(time.as_str()))));
        if !self.set_aside.is_empty() {
            root.push(("set_aside".to_owned(), Json::Object(self.set_aside.clone())));
        }
        root.extend(self.extra.iter().cloned());
        Json::Object(root).pretty()
    }

    /// The record as JSON, without the entries that are not understood.
    pub fn understood_json(&self) -> String {
        let mut record = self.clone();
        record.entries.retain(|_, entry| entry.understood);
        record.encode()
    }

    /// The whole record as JSON, as its file has it.
    pub fn to_json(&self) -> String {
        self.encode()
    }
}
