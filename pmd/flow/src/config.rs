//! TOML format: `[[rule]]` tables.
//!
//! ```toml
//! [[rule]]
//! rule = "ingress prio 10: ipv4 dst 10.0.0.0/8 => drop"
//!
//! [[rule]]                       # the same, key by key
//! direction = "ingress"
//! priority = 10
//! pattern = [{ item = "ipv4", dst = "10.0.0.0/8" }]
//! actions = [{ action = "drop" }]
//! ```

use toml::de::DeValue;

use super::Rule;
use super::ast::{AstNode, Pair, RuleAst, Word, WordError, action_spec, item_kind};
use super::json::pair;
use super::masked_value::Ports;
use super::rule_file::FileRule;
use wirepath_settings::{
    Choice, ConfigError, ConfigTable, Flag, FromValue, Integer, Key, Required, Settings, Span, Text, WithDefault,
    Written,
};

const RULE_TEXT: Key<Text> = Key::text("rule", "a rule in the rule language")
    .absent("the rule is written with the other keys")
    .about("The whole rule as text. It excludes all other keys of the table.");
const DIRECTION: Key<Choice<&str>> = Key::choice(
    "direction",
    &[
        ("ingress", "ingress", "the rule applies to packets that a port has received"),
        ("egress", "egress", "the rule applies to packets that leave by a port"),
    ],
)
.absent("an error, unless the rule is written as text")
.about("Packets to which the rule applies.");
const PRIORITY: Key<Integer<u32>> =
    Key::integer("priority", 0..=u32::MAX as i64).same_as("0").when("direction = \"ingress\"").about(
        "The matching rule with the lowest number applies. Among equal numbers, it is the first one of the list. Rules \
         of ingress and egress do not compete.",
    );
const ITEM: Key<Required<Text>> =
    Key::text("item", "name of an item of the rule language").required().about("Header or property to match.");
const INNER: Key<WithDefault<Flag>> =
    Key::flag("inner").default(false).about("Matches the header inside a tunnel instead of the outer one.");
const ACTION: Key<Required<Text>> =
    Key::text("action", "name of an action of the rule language").required().about("Effect of the rule.");

static PATTERN: ConfigTable = ConfigTable {
    name: "pattern",
    written: Written::InlineList,
    about: "Conditions that a packet must meet, from the outermost header on.",
    absent: "the rule applies to all packets",
    keys: &[&ITEM, &INNER],
    others: "the fields of the item, each with a value, `VALUE mask MASK` or a prefix",
    example: "pattern = [{ item = \"ipv4\", dst = \"10.0.0.0/8\" }, { item = \"udp\", dst = 53 }]\n",
    ..ConfigTable::EMPTY
};

static ACTIONS: ConfigTable = ConfigTable {
    name: "actions",
    written: Written::InlineList,
    about: "Effects of the rule, in order.",
    absent: "an error, unless the rule is written as text",
    keys: &[&ACTION],
    others: "the arguments of the action",
    example: "actions = [{ action = \"mark\", value = 7 }, { action = \"drop\" }]\n",
    ..ConfigTable::EMPTY
};

/// Description of a table `[[rule]]`.
pub static RULE: ConfigTable = ConfigTable {
    name: "rule",
    written: Written::Repeated,
    about: "A flow rule: as text, or key by key with `direction`, `priority`, `pattern` and `actions`.",
    absent: "there are no rules in the configuration itself",
    keys: &[&RULE_TEXT, &DIRECTION, &PRIORITY],
    tables: || vec![&PATTERN, &ACTIONS],
    alternatives: true,
    example: "[[rule]]\nrule = \"ingress prio 10: ipv4 dst 10.0.0.0/8 => drop\"\n",
    ..ConfigTable::EMPTY
};

/// Reads the `[[rule]]` tables in order. Rules may use the port names in `ports`. The error has those of all invalid
/// rules.
pub fn from_settings(settings: &Settings<'_>, ports: Ports<'_>) -> Result<Vec<Rule>, ConfigError> {
    settings.read_tables(&RULE, |table| rule(table, ports))
}

/// Reads the `[[rule]]` tables in order, with the position of each. Invalid rules are entries of the list,
/// and reading continues after them.
pub fn list_from_settings(settings: &Settings<'_>, ports: Ports<'_>) -> Result<Vec<FileRule>, ConfigError> {
    let listed = |table: Settings<'_>| {
        let span = if table.has(&RULE_TEXT) { table.span(&RULE_TEXT) } else { table.span(&DIRECTION) };
        FileRule { span, rule: table.separately(|table| rule(table, ports)) }
    };
    Ok(settings.subtables(&RULE)?.into_iter().map(listed).collect())
}

fn rule(table: &Settings<'_>, ports: Ports<'_>) -> Result<Rule, ConfigError> {
    if table.has(&RULE_TEXT) {
        // The error of a value that is no string is recorded.
        let text = table.read(&RULE_TEXT)?.ok_or_else(|| table.error_in(&RULE_TEXT, "expected a string"))?;
        let rule = Rule::parse(&text, ports);
        return rule.map_err(|error| table.span_within(&RULE_TEXT, error.span.start).error(error.message));
    }
    let mut reader = Reader { spans: vec![table.span(&ACTIONS)] };
    let direction = table.read(&DIRECTION)?;
    let Some(direction) = direction else {
        let missing = "missing: \"rule\" with the rule as text, or \"direction\"";
        return Err(if table.has(&DIRECTION) { table.error_in(&DIRECTION, missing) } else { table.error(missing) });
    };
    let direction = reader.word(table, DIRECTION.name(), direction.to_owned());
    let priority = table.read(&PRIORITY)?;
    let priority = priority.map(|priority| reader.word(table, PRIORITY.name(), priority.to_string()));
    let mut items = Vec::new();
    for item in table.subtables(&PATTERN)? {
        let name = item.read(&ITEM)?;
        let name = reader.word(&item, ITEM.name(), name);
        let kind = item_kind(&name).map_err(|error| reader.error(error))?;
        let inner = item.read(&INNER)?;
        let fields = kind.spec().fields.iter().map(|field| field.name());
        let pairs = reader.pairs(item, true, fields)?;
        items.push(AstNode { name, inner, pairs });
    }
    let mut actions = Vec::new();
    for action in table.subtables(&ACTIONS)? {
        let name = action.read(&ACTION)?;
        let name = reader.word(&action, ACTION.name(), name);
        let spec = action_spec(&name).map_err(|error| reader.error(error))?;
        let arguments = spec.positional.iter().chain(spec.named).copied();
        let pairs = reader.pairs(action, false, arguments)?;
        actions.push(AstNode { name, inner: false, pairs });
    }
    table.check_keys()?;
    RuleAst { at: 0, direction, priority, items, actions }.rule(ports).map_err(|error| reader.error(error))
}

struct Reader {
    spans: Vec<Span>,
}

impl Reader {
    fn word(&mut self, table: &Settings<'_>, key: &'static str, text: String) -> Word {
        self.spans.push(table.span(key));
        Word { text, at: self.spans.len() - 1 }
    }

    fn pairs(
        &mut self,
        table: Settings<'_>,
        masks: bool,
        keys: impl Iterator<Item = &'static str>,
    ) -> Result<Vec<Pair>, ConfigError> {
        let mut pairs = Vec::new();
        for key in keys {
            let Some(Scalar(text)) = table.get::<Scalar>(key)? else { continue };
            let value = self.word(&table, key, text);
            pairs.push(pair(Word { text: key.to_owned(), at: value.at }, value, masks));
        }
        table.finish()?;
        Ok(pairs)
    }

    fn error(&self, error: WordError) -> ConfigError {
        self.spans[error.at.min(self.spans.len() - 1)].error(error.message)
    }
}

/// A number, a string, or a list of them.
struct Scalar(String);

impl FromValue for Scalar {
    const EXPECTED: &'static str = "a number, a string or a list of them";

    fn from_value(value: &DeValue<'_>) -> Option<Self> {
        match value {
            DeValue::Array(list) => {
                let words = list.iter().map(|value| Self::from_value(value.get_ref()).map(|Scalar(text)| text));
                words.collect::<Option<Vec<_>>>().map(|words| Self(words.join("+")))
            }
            DeValue::String(text) => Some(Self(text.to_string())),
            other => i64::from_value(other).map(|number| Self(number.to_string())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use wirepath_packet::PortId;
    use wirepath_settings::Source;

    fn read(text: &str) -> Result<Vec<Rule>, String> {
        let source = Source::new("c.toml", text);
        let document = source.parse().map_err(|e| e.to_string())?;
        let settings = document.settings();
        let rules = from_settings(&settings, Ports(&[("lan", PortId::new(1)), ("wan", PortId::new(2))]))
            .map_err(|e| e.to_string())?;
        settings.finish().map_err(|e| e.to_string())?;
        Ok(rules)
    }

    #[test]
    fn rule_text_and_keys_give_the_same_rule() {
        let rules = read(
            r#"
            [[rule]]
            rule = """ingress prio 3: port id lan / ipv4 dst 10.0.0.0/8 ttl 0x1 mask 0x3 / udp dst 53
                => mark 7, rss queues 0-1+4"""

            [[rule]]
            direction = "ingress"
            priority = 3
            pattern = [
                { item = "port", id = "lan" },
                { item = "ipv4", dst = "10.0.0.0/8", ttl = "1 mask 3" },
                { item = "udp", dst = 0x35 },
            ]
            actions = [
                { action = "mark", value = 7 },
                { action = "rss", queues = [0, 1, 4], on = ["src", "dst", "sport", "dport"] },
            ]

            [[rule]]
            direction = "egress"
            actions = [{ action = "drop" }]
            "#,
        )
        .unwrap();
        assert_eq!(rules[0], rules[1]);
        assert_eq!(
            rules[0].to_string(),
            "ingress prio 3: port id 1 / ipv4 dst 10.0.0.0/8 ttl 0x1 mask 0x3 / udp dst 53 \
             => mark 7, rss queues 0-1+4 on src+dst+sport+dport"
        );
        assert_eq!(rules[2].to_string(), "egress prio 0: any => drop");
        assert_eq!(read("").unwrap(), []);
    }

    #[test]
    fn errors_have_a_line_and_a_key() {
        let cases = [
            (
                "[[rule]]\nrule = 'ingress: ipv5 => drop'",
                "c.toml:2:18: rule[0].rule: unknown item \"ipv5\"; did you mean \"ipv4\"?",
            ),
            ("[[rule]]\nrule = 'ingress: any => drop'\npriority = 3", "c.toml:3:1: rule[0].priority: unknown key"),
            ("[[rule]]\npriority = 3", "c.toml:1:1: rule[0]: missing: \"rule\""),
            (
                "[[rule]]\ndirection = 'ingress'\npattern = [{ item = 'ipv4', dst = '10.0.0.1/8' }]\n\
                 actions = [{ action = 'drop' }]",
                "c.toml:3:35: rule[0].pattern[0].dst: \"10.0.0.1/8\" has bits outside its mask; write 10.0.0.0/8",
            ),
            (
                "[[rule]]\ndirection = 'ingress'\npattern = [{ item = 'ipv4', dts = '10.0.0.1' }]\n\
                 actions = [{ action = 'drop' }]",
                "c.toml:3:29: rule[0].pattern[0].dts: unknown key; did you mean \"dst\"?",
            ),
            (
                "[[rule]]\ndirection = 'ingress'\npattern = [{ item = 'ipv' }]",
                "c.toml:3:21: rule[0].pattern[0].item: unknown item \"ipv\"; did you mean \"ipv4\"?",
            ),
            (
                "[[rule]]\ndirection = 'ingress'\nactions = [{ action = 'queue' }]",
                "c.toml:3:23: rule[0].actions[0].action: \"queue\" needs id",
            ),
            (
                "[[rule]]\ndirection = 'ingress'\n\
                 actions = [{ action = 'drop' }, { action = 'redirect', port = 'lam' }]",
                "rule[0].actions[1].port: no port is called \"lam\"; did you mean \"lan\"?",
            ),
            (
                "[[rule]]\ndirection = 'ingress'\npattern = [{ item = 'tcp' }, { item = 'vxlan' }]\n\
                 actions = [{ action = 'drop' }]",
                "rule[0].pattern[1].item: layer 4 cannot be both tcp and udp",
            ),
            (
                "[[rule]]\ndirection = 'ingress'\npriority = -1",
                "rule[0].priority: found -1, expected an integer from 0 to 4294967295",
            ),
        ];
        for (text, expected) in cases {
            let error = read(text).unwrap_err();
            assert!(error.contains(expected), "{error}\n{expected}");
        }
    }
}
