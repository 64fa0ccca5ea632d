//! JSON as it is found in files that people and other programs write: numbers keep their spelling, members their order and
//! their repeats, and what no JSON may hold (`NaN`, a lone surrogate) is one bad value instead of a bad file.

mod read;
mod write;

pub use read::Refusal;

/// 2⁵³: below it a double is exact to the unit.
const EXACT: f64 = 9_007_199_254_740_992.0;

/// A JSON value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Json {
    /// `null`.
    Null,
    /// `true` or `false`.
    Bool(bool),
    /// A number, as it is spelled. It may be beyond what a double holds.
    Number(String),
    /// A text.
    Text(String),
    /// `[…]`.
    List(Vec<Json>),
    /// `{…}`: members in their order. A name may be there twice.
    Object(Vec<(String, Json)>),
    /// What a lenient reader found and no JSON may hold.
    Bad {
        /// What is wrong with it.
        reason: String,
        /// How it is spelled.
        text: String,
    },
}

impl Json {
    /// Reads a whole text.
    pub fn parse(bytes: &[u8]) -> Result<Self, Refusal> {
        read::parse(bytes)
    }

    /// A finite number; `None` for the others, which JSON does not have.
    pub fn number(value: f64) -> Option<Self> {
        value.is_finite().then(|| Self::Number(value.to_string()))
    }

    /// A text.
    pub fn text(value: impl Into<String>) -> Self {
        Self::Text(value.into())
    }

    /// An object of these members.
    pub fn object<N: Into<String>>(members: impl IntoIterator<Item = (N, Self)>) -> Self {
        Self::Object(members.into_iter().map(|(name, value)| (name.into(), value)).collect())
    }

    /// A member of an object: the last of that name.
    pub fn get(&self, name: &str) -> Option<&Self> {
        self.members()?.iter().rev().find(|(own, _)| own == name).map(|(_, value)| value)
    }

    /// The members, if it is an object.
    pub fn members(&self) -> Option<&[(String, Self)]> {
        if let Self::Object(members) = self { Some(members) } else { None }
    }

    /// The text, if it is one.
    pub fn as_text(&self) -> Option<&str> {
        if let Self::Text(text) = self { Some(text) } else { None }
    }

    /// The number, if it is one that a double holds.
    pub fn as_f64(&self) -> Option<f64> {
        let Self::Number(text) = self else { return None };
        text.parse().ok().filter(|value: &f64| value.is_finite())
    }

    /// The number, if it is a whole one from 0 on, also if it is spelled `2.0` or `2e0`.
    pub fn as_u64(&self) -> Option<u64> {
        let Self::Number(text) = self else { return None };
        let whole = |number: &f64| number.fract() == 0.0 && (0.0..EXACT).contains(number);
        text.parse().ok().or_else(|| {
            self.as_f64().filter(whole).map(|number| format!("{:.0}", number.abs()).parse().ok())?
        })
    }

    /// What kind of value it is, in JSON's words.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Null => "null",
            Self::Bool(_) => "boolean",
            Self::Number(_) => "number",
            Self::Text(_) => "string",
            Self::List(_) => "array",
            Self::Object(_) => "object",
            Self::Bad { .. } => "no JSON",
        }
    }

    /// Why this value may not be written as it is: something bad in it, or a name that is there twice in one object.
    pub fn flaw(&self) -> Option<String> {
        match self {
            Self::Bad { reason, .. } => Some(reason.clone()),
            Self::List(items) => items.iter().find_map(Self::flaw),
            Self::Object(members) => {
                let mut names: Vec<&str> = members.iter().map(|(name, _)| name.as_str()).collect();
                names.sort_unstable();
                let twice = names.windows(2).find(|pair| pair[0] == pair[1]);
                twice
                    .map(|pair| format!("{:?} is there twice", pair[0]))
                    .or_else(|| members.iter().find_map(|(_, value)| value.flaw()))
            }
            _ => None,
        }
    }

    /// The one spelling of a value: no white space, members by name, ASCII only. Hashes are made of it.
    pub fn canonical(&self) -> String {
        write::canonical(self)
    }

    /// The text of a file: indented, one member a line.
    pub fn pretty(&self) -> String {
        write::pretty(self)
    }
}
