//! The JSON of a header and of an index, read without keeping more than is needed, and
//! given up when the caller is gone.

use std::{collections::HashMap, fmt};

use flextensord_proto::limit;
use serde::{
    Deserialize, Deserializer,
    de::{DeserializeSeed, Error, IgnoredAny, MapAccess, SeqAccess, Visitor},
};

use super::super::loader::Watch;

const METADATA: &str = "__metadata__";

/// A tensor's entry in the header. Other keys are ignored, as the reference reader does.
#[derive(Deserialize)]
pub(crate) struct Entry {
    pub(crate) dtype: String,
    #[serde(deserialize_with = "shape")]
    pub(crate) shape: Vec<u64>,
    pub(crate) data_offsets: [u64; 2],
}

fn shape<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u64>, D::Error> {
    struct Dimensions;
    impl<'de> Visitor<'de> for Dimensions {
        type Value = Vec<u64>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("dimensions")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Vec<u64>, A::Error> {
            let mut shape = Vec::new();
            while let Some(dimension) = seq.next_element()? {
                if shape.len() == limit::DIMENSIONS {
                    let text = format!("a shape of more than {} dimensions", limit::DIMENSIONS);
                    return Err(A::Error::custom(text));
                }
                shape.push(dimension);
            }
            Ok(shape)
        }
    }
    deserializer.deserialize_seq(Dimensions)
}

/// Reads a header: tensors by name, each once, without the free-form `__metadata__`, of
/// which nothing is kept.
pub(crate) struct Header<'a>(pub(crate) &'a dyn Watch);

impl<'de> DeserializeSeed<'de> for Header<'_> {
    type Value = Vec<(String, Entry)>;

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<Self::Value, D::Error> {
        from.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Header<'_> {
    type Value = Vec<(String, Entry)>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("tensors by name")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut has_metadata = false;
        let mut entries: Self::Value = Vec::new();
        while let Some(key) = map.next_key::<String>()? {
            look(self.0)?;
            if key == METADATA {
                if has_metadata {
                    return Err(twice(&key));
                }
                has_metadata = true;
                map.next_value_seed(Metadata(self.0))?;
            } else if entries.len() == limit::TENSORS {
                return Err(too_many());
            } else {
                entries.push((key, map.next_value()?));
            }
        }
        let mut names: Vec<&str> = entries.iter().map(|(name, _)| name.as_str()).collect();
        names.sort_unstable();
        match names.windows(2).find(|pair| pair.first() == pair.last()) {
            Some(pair) => Err(twice(pair.first().copied().unwrap_or_default())),
            None => Ok(entries),
        }
    }
}

/// Strings by name, of which nothing is kept.
struct Metadata<'a>(&'a dyn Watch);

impl<'de> DeserializeSeed<'de> for Metadata<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<(), D::Error> {
        from.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Metadata<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of strings")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while map.next_entry::<Skipped, Skipped>()?.is_some() {
            look(self.0)?;
        }
        Ok(())
    }
}

/// A string that is not kept.
struct Skipped;

impl<'de> Deserialize<'de> for Skipped {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Text;
        impl Visitor<'_> for Text {
            type Value = Skipped;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string")
            }

            fn visit_str<E: Error>(self, _: &str) -> Result<Skipped, E> {
                Ok(Skipped)
            }
        }
        from.deserialize_str(Text)
    }
}

/// Reads an index: its `weight_map`, file by tensor, each tensor once.
pub(crate) struct Index<'a>(pub(crate) &'a dyn Watch);

impl<'de> DeserializeSeed<'de> for Index<'_> {
    type Value = HashMap<String, String>;

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<Self::Value, D::Error> {
        from.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Index<'_> {
    type Value = HashMap<String, String>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with a weight_map")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut found = None;
        while let Some(key) = map.next_key::<String>()? {
            look(self.0)?;
            if key != "weight_map" {
                map.next_value::<IgnoredAny>()?;
            } else if found.is_some() {
                return Err(twice(&key));
            } else {
                found = Some(map.next_value_seed(WeightMap(self.0))?);
            }
        }
        found.ok_or_else(|| A::Error::missing_field("weight_map"))
    }
}

struct WeightMap<'a>(&'a dyn Watch);

impl<'de> DeserializeSeed<'de> for WeightMap<'_> {
    type Value = HashMap<String, String>;

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<Self::Value, D::Error> {
        from.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for WeightMap<'_> {
    type Value = HashMap<String, String>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("files by tensor")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut files = HashMap::new();
        while let Some(tensor) = map.next_key::<String>()? {
            look(self.0)?;
            if files.len() == limit::TENSORS {
                return Err(too_many());
            }
            if files.contains_key(&tensor) {
                return Err(twice(&tensor));
            }
            files.insert(tensor, map.next_value()?);
        }
        Ok(files)
    }
}

fn look<E: Error>(watch: &dyn Watch) -> Result<(), E> {
    if watch.is_cancelled() {
        return Err(E::custom("given up"));
    }
    Ok(())
}

fn too_many<E: Error>() -> E {
    E::custom(format!("more than {} tensors", limit::TENSORS))
}

fn twice<E: Error>(key: &str) -> E {
    let shown: String = key.chars().take(64).collect();
    E::custom(format!("key {shown:?} appears twice"))
}
