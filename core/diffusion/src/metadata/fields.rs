//! Named settings of any program. A reader takes them one by one, and reports those that it did not take.

use super::{Error, Reading, Record};
use crate::{names, sampler::Sampler, schedule::Schedule};
use serde_json::Value;

/// Settings that have not been read yet.
pub(super) struct Fields {
    fields: Vec<(String, Value)>,
    unread: Vec<String>,
}

impl Fields {
    pub(super) fn new(fields: impl IntoIterator<Item = (String, Value)>) -> Self {
        Fields { fields: fields.into_iter().collect(), unread: Vec::new() }
    }

    /// The fields of a JSON object.
    pub(super) fn of_json(program: &'static str, json: Value) -> Result<Self, Error> {
        match json {
            Value::Object(fields) => Ok(Self::new(fields)),
            _ => Err(Error::Unreadable { program, why: "it is not a JSON object".into() }),
        }
    }

    /// Notes a setting that was not understood.
    pub(super) fn note(&mut self, sentence: impl Into<String>) {
        self.unread.push(sentence.into());
    }

    /// Removes a field.
    pub(super) fn take(&mut self, name: &str) -> Option<Value> {
        let at = self.fields.iter().position(|(field, _)| field == name)?;
        let value = self.fields.remove(at).1;
        (!value.is_null()).then_some(value)
    }

    /// Removes fields that do not change the picture.
    pub(super) fn ignore(&mut self, names: &[&str]) {
        self.fields.retain(|(name, _)| !names.contains(&name.as_str()));
    }

    /// A text that is not empty.
    pub(super) fn text(&mut self, name: &str) -> Option<String> {
        match self.take(name)? {
            Value::String(text) => (!text.trim().is_empty()).then_some(text),
            other => Some(other.to_string()),
        }
    }

    /// A finite number.
    pub(super) fn real(&mut self, name: &str) -> Option<f64> {
        self.parse(name, "a number", |text| text.parse().ok().filter(|number: &f64| number.is_finite()))
    }

    /// A whole number of at least 0.
    pub(super) fn whole(&mut self, name: &str) -> Option<u64> {
        self.parse(name, "a whole number", whole)
    }

    /// As [`whole`](Self::whole).
    pub(super) fn size(&mut self, name: &str) -> Option<usize> {
        self.whole(name).and_then(|number| usize::try_from(number).ok())
    }

    /// A width and a height, as in "512x768".
    pub(super) fn sizes(&mut self, name: &str) -> Option<(usize, usize)> {
        self.parse(name, "a size", |text| {
            let (width, height) = text.split_once('x')?;
            Some((width.parse().ok()?, height.parse().ok()?))
        })
    }

    /// A sampler, and the schedule that its name may contain.
    pub(super) fn sampler(&mut self, name: &str) -> (Option<Sampler>, Option<Schedule>) {
        let found = self.parse(name, "a sampler that sdrun has", names::sampler);
        found.map_or((None, None), |(sampler, schedule)| (Some(sampler), schedule))
    }

    /// A schedule.
    pub(super) fn schedule(&mut self, name: &str) -> Option<Schedule> {
        self.parse(name, "a schedule that sdrun has", names::schedule)
    }

    /// A value that is understood, or else noted.
    pub(super) fn parse<T>(
        &mut self,
        name: &str,
        what: &str,
        parse: impl Fn(&str) -> Option<T>,
    ) -> Option<T> {
        let text = self.text(name)?;
        self.known(name, &text, what, parse)
    }

    /// The value that `text` stands for. If there is none, that is noted.
    pub(super) fn known<T>(
        &mut self,
        name: &str,
        text: &str,
        what: &str,
        find: impl Fn(&str) -> Option<T>,
    ) -> Option<T> {
        let value = find(text.trim());
        if value.is_none() {
            self.note(format!("`{name}: {}` is not {what}", shortened(text)));
        }
        value
    }

    /// The result, which notes the fields that nobody took.
    pub(super) fn finish(mut self, record: Record) -> Reading {
        for (name, value) in std::mem::take(&mut self.fields) {
            let idle = matches!(&value, Value::Null | Value::Bool(false))
                || value.as_array().is_some_and(Vec::is_empty)
                || value.as_object().is_some_and(serde_json::Map::is_empty)
                || value.as_str().is_some_and(|text| text.trim().is_empty());
            if !idle {
                let value = value.as_str().map_or_else(|| value.to_string(), str::to_string);
                self.note(format!("`{name}: {}` is unknown", shortened(&value)));
            }
        }
        Reading { record, unread: self.unread }
    }
}

/// A whole number, also one with a fraction of 0.
fn whole(text: &str) -> Option<u64> {
    let (number, fraction) = text.split_once('.').unwrap_or((text, ""));
    number.parse().ok().filter(|_| fraction.bytes().all(|byte| byte == b'0'))
}

/// The start of a long text.
fn shortened(text: &str) -> String {
    const MOST: usize = 80;
    match text.char_indices().nth(MOST) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.into(),
    }
}
