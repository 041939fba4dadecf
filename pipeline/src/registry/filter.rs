use serde_json::Value;
use wirepath_settings::nearest;

use super::{Row, TableSpec};

/// Conditions on the rows of a table. A row is accepted if all of them are true.
#[derive(Clone, Debug, Default)]
pub struct Filter {
    conditions: Vec<Condition>,
}

/// Error in a condition.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct FilterError(String);

#[derive(Clone, Debug)]
struct Condition {
    column: usize,
    operator: Operator,
    text: String,
    number: Option<f64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Operator {
    Equal,
    NotEqual,
    Contains,
    NotContains,
    AtLeast,
    AtMost,
    Above,
    Below,
}

/// The operators; those that begin with another one come before it.
const OPERATORS: [(&str, Operator); 8] = [
    ("!=", Operator::NotEqual),
    ("!~", Operator::NotContains),
    (">=", Operator::AtLeast),
    ("<=", Operator::AtMost),
    ("=", Operator::Equal),
    ("~", Operator::Contains),
    (">", Operator::Above),
    ("<", Operator::Below),
];

impl Filter {
    /// Reads conditions such as `port=wan`, `mac~02:00`, `state!=up` or `packets>1000`. `~` means "contains".
    ///
    /// # Errors
    /// For a condition without an operator, a column that the table does not have, and an order of what is no number.
    pub fn parse<S: AsRef<str>>(table: &TableSpec, conditions: &[S]) -> Result<Self, FilterError> {
        let condition = |text: &S| condition(table, text.as_ref()).map_err(FilterError);
        Ok(Self { conditions: conditions.iter().map(condition).collect::<Result<_, _>>()? })
    }

    /// Returns whether all conditions are true.
    pub fn accepts(&self, row: &Row) -> bool {
        self.conditions.iter().all(|condition| row.get(condition.column).is_some_and(|value| condition.accepts(value)))
    }
}

fn condition(table: &TableSpec, text: &str) -> Result<Condition, String> {
    let operator = text.char_indices().find_map(|(at, _)| {
        let operator = OPERATORS.iter().find(|(symbol, _)| text[at..].starts_with(symbol))?;
        Some((at, operator))
    });
    let Some((at, (symbol, operator))) = operator else {
        return Err(format!("condition \"{text}\": expected COLUMN=VALUE, or !=, ~, !~, <, <=, >, >= instead of ="));
    };
    let (name, value) = (text[..at].trim(), text[at + symbol.len()..].trim());
    let Some(column) = table.column(name) else {
        let names: Vec<&str> = table.columns.iter().map(|column| column.name).collect();
        return Err(match nearest(name, &names) {
            Some(near) => format!("table {} has no column \"{name}\"; did you mean \"{near}\"?", table.name),
            None => {
                format!("table {} has no column \"{name}\"; its columns are {}", table.name, names.join(", "))
            }
        });
    };
    let number = value.parse().ok();
    if number.is_none() && matches!(operator, Operator::AtLeast | Operator::AtMost | Operator::Above | Operator::Below)
    {
        return Err(format!("condition \"{text}\": \"{value}\" is not a number"));
    }
    Ok(Condition { column, operator: *operator, text: value.to_owned(), number })
}

impl Condition {
    fn accepts(&self, value: &Value) -> bool {
        let text = match value {
            Value::String(text) => text.clone(),
            Value::Null => String::new(),
            other => other.to_string(),
        };
        let order = || Some(value.as_f64()?.total_cmp(&self.number?));
        match self.operator {
            Operator::Equal => text == self.text,
            Operator::NotEqual => text != self.text,
            Operator::Contains => text.contains(&self.text),
            Operator::NotContains => !text.contains(&self.text),
            Operator::AtLeast => order().is_some_and(|order| order.is_ge()),
            Operator::AtMost => order().is_some_and(|order| order.is_le()),
            Operator::Above => order().is_some_and(|order| order.is_gt()),
            Operator::Below => order().is_some_and(|order| order.is_lt()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Column, Unit};
    use super::*;

    const TABLE: TableSpec = TableSpec {
        name: "things",
        about: "",
        metric: None,
        columns: &[
            Column::key("name", ""),
            Column::attribute("state", ""),
            Column::counter("packets", Unit::Packets, ""),
        ],
    };

    #[test]
    fn conditions_select_rows() {
        let rows: [Row; 3] = [
            vec!["wan".into(), "up".into(), 10.into()],
            vec!["lan".into(), "down".into(), 200.into()],
            vec!["dmz=1".into(), Value::Null, 0.into()],
        ];
        let selected = |conditions: &[&str]| -> Vec<usize> {
            let filter = Filter::parse(&TABLE, conditions).unwrap();
            (0..3).filter(|i| filter.accepts(&rows[*i])).collect()
        };
        assert_eq!(selected(&[]), [0, 1, 2]);
        assert_eq!(selected(&["name=wan"]), [0]);
        assert_eq!(selected(&["name = dmz=1"]), [2]);
        assert_eq!(selected(&["name~an", "state!=up"]), [1]);
        assert_eq!(selected(&["name!~an"]), [2]);
        assert_eq!(selected(&["state="]), [2]);
        assert_eq!(selected(&["packets>10"]), [1]);
        assert_eq!(selected(&["packets>=10"]), [0, 1]);
        assert_eq!(selected(&["packets<=10", "packets > 0"]), [0]);
        assert_eq!(selected(&["packets<10"]), [2]);
        // A text has no order.
        assert_eq!(selected(&["name>1"]), [0; 0]);
    }

    #[test]
    fn errors_name_the_condition_and_the_column() {
        let error = |condition: &str| Filter::parse(&TABLE, &[condition]).unwrap_err().to_string();
        assert!(error("wan").starts_with("condition \"wan\": expected COLUMN=VALUE"));
        assert_eq!(error("packet=1"), "table things has no column \"packet\"; did you mean \"packets\"?");
        assert!(error("zzz=1").ends_with("its columns are name, state, packets"));
        assert_eq!(error("packets>many"), "condition \"packets>many\": \"many\" is not a number");
        assert!(error("é").contains("expected COLUMN=VALUE"));
    }
}
