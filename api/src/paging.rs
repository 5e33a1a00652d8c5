//! Lists: `{"items": […], "next_cursor": string|null}`. A cursor is opaque; it names the list and the last item of the page.

use base64::{Engine, prelude::BASE64_URL_SAFE_NO_PAD};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use utoipa::IntoParams;

use crate::error::{ApiError, Result};

/// Items of a page unless the client says otherwise.
const DEFAULT_LIMIT: u32 = 100;
/// Most items of a page.
const MAX_LIMIT: u32 = 1000;

/// Which page, of lists that take nothing else.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(crate) struct PageQuery {
    /// `next_cursor` of the page before.
    cursor: Option<String>,
    /// Items, 1 to 1000.
    #[param(default = 100, minimum = 1, maximum = 1000)]
    limit: Option<u32>,
}

impl PageQuery {
    /// The page of this list.
    pub(crate) fn window<K: Serialize + DeserializeOwned>(&self, list: &'static str) -> Result<Window<K>> {
        Window::new(list, self.cursor.as_deref(), self.limit)
    }
}

/// The part of a list that a client asks for.
#[derive(Debug)]
pub(crate) struct Window<K> {
    list: &'static str,
    /// Key of the item before the first.
    pub(crate) after: Option<K>,
    /// Items, at most.
    pub(crate) limit: u32,
}

impl<K: Serialize> Window<K> {
    /// Checks `?cursor=` and `?limit=`.
    pub(crate) fn new(list: &'static str, cursor: Option<&str>, limit: Option<u32>) -> Result<Self>
    where
        K: DeserializeOwned,
    {
        let limit = limit.unwrap_or(DEFAULT_LIMIT);
        if !(1..=MAX_LIMIT).contains(&limit) {
            return Err(ApiError::invalid_parameter(format!("limit is 1 to {MAX_LIMIT}.")));
        }
        let after = cursor.map(|cursor| decode(list, cursor).ok_or_else(no_cursor)).transpose()?;
        Ok(Self { list, after, limit })
    }

    /// How many to read: one more than the page has says whether there is another.
    pub(crate) fn fetch(&self) -> u32 {
        self.limit + 1
    }

    /// Cuts what was read down to the page, and says where the next one begins.
    pub(crate) fn cut<T>(&self, items: &mut Vec<T>, key: impl Fn(&T) -> K) -> Option<String> {
        let wanted = self.limit as usize;
        let more = items.len() > wanted;
        items.truncate(wanted);
        items.last().filter(|_| more).map(|item| self.cursor(&key(item)))
    }

    /// The cursor behind an item with this key.
    pub(crate) fn cursor(&self, key: &K) -> String {
        BASE64_URL_SAFE_NO_PAD.encode(serde_json::to_vec(&(self.list, key)).unwrap_or_default())
    }
}

fn decode<K: DeserializeOwned>(list: &str, cursor: &str) -> Option<K> {
    let bytes = BASE64_URL_SAFE_NO_PAD.decode(cursor).ok()?;
    let (of, key): (String, K) = serde_json::from_slice(&bytes).ok()?;
    (of == list).then_some(key)
}

fn no_cursor() -> ApiError {
    ApiError::invalid_parameter("That is no cursor of this list.")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_cut_and_its_cursor_leads_on() {
        let first = Window::<u32>::new("numbers", None, Some(2)).ok().unwrap();
        assert_eq!((first.fetch(), first.after), (3, None));
        let mut items = vec![7, 8, 9];
        let next = first.cut(&mut items, |item| *item).unwrap();
        assert_eq!(items, [7, 8]);
        let second = Window::<u32>::new("numbers", Some(&next), None).ok().unwrap();
        assert_eq!((second.after, second.limit), (Some(8), 100));
        assert_eq!(second.cut(&mut vec![9], |item| *item), None);
    }

    #[test]
    fn cursors_of_other_lists_and_limits_out_of_range_are_refused() {
        let cursor = Window::<u32>::new("numbers", None, None).ok().unwrap().cursor(&1);
        for bad in ["", "!", "e30", &cursor[1..]] {
            assert!(Window::<u32>::new("numbers", Some(bad), None).is_err(), "{bad}");
        }
        assert!(Window::<u32>::new("letters", Some(&cursor), None).is_err());
        assert!(Window::<String>::new("numbers", Some(&cursor), None).is_err());
        assert!(Window::<u32>::new("numbers", None, Some(0)).is_err());
        assert!(Window::<u32>::new("numbers", None, Some(1001)).is_err());
    }
}
