//! JSON objects whose keys are all different, which the header and the index are.

use std::{collections::HashSet, fmt, marker::PhantomData};

use flextensord_proto::limit;
use serde::{
    Deserialize, Deserializer,
    de::{Error as _, MapAccess, Visitor},
};

/// A tensor's entry in the header. Other keys are ignored, as the reference reader does.
#[derive(Deserialize)]
pub(crate) struct Entry {
    pub(crate) dtype: String,
    pub(crate) shape: Vec<u64>,
    pub(crate) data_offsets: [u64; 2],
}

/// Tensors by name, each once, without the free-form `__metadata__`.
pub(crate) struct Header(pub(crate) Vec<(String, Entry)>);

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = Header;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("tensors by name")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
                let mut seen = HashSet::new();
                let mut entries = Vec::new();
                while let Some(key) = map.next_key::<String>()? {
                    if key == "__metadata__" {
                        map.next_value::<UniqueMap<String>>()?;
                    } else if entries.len() == limit::TENSORS {
                        let text = format!("more than {} tensors", limit::TENSORS);
                        return Err(A::Error::custom(text));
                    } else {
                        entries.push((key.clone(), map.next_value()?));
                    }
                    once::<A::Error>(&mut seen, key)?;
                }
                Ok(Header(entries))
            }
        }
        deserializer.deserialize_map(Entries)
    }
}

/// A JSON object whose keys are all different.
pub(crate) struct UniqueMap<V>(pub(crate) Vec<(String, V)>);

impl<'de, V: Deserialize<'de>> Deserialize<'de> for UniqueMap<V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Pairs<V>(PhantomData<V>);
        impl<'de, V: Deserialize<'de>> Visitor<'de> for Pairs<V> {
            type Value = UniqueMap<V>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<UniqueMap<V>, A::Error> {
                let mut seen = HashSet::new();
                let mut pairs = Vec::new();
                while let Some((key, value)) = map.next_entry::<String, V>()? {
                    once::<A::Error>(&mut seen, key.clone())?;
                    pairs.push((key, value));
                }
                Ok(UniqueMap(pairs))
            }
        }
        deserializer.deserialize_map(Pairs(PhantomData))
    }
}

fn once<E: serde::de::Error>(seen: &mut HashSet<String>, key: String) -> Result<(), E> {
    if seen.contains(&key) {
        let shown: String = key.chars().take(64).collect();
        return Err(E::custom(format!("key {shown:?} appears twice")));
    }
    seen.insert(key);
    Ok(())
}
