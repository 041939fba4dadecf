use serde_json::{Map, Value};
use wirepath_packet::registered::{check_name, check_text};

use super::change::{check_arguments, number, text};
use super::{Argument, Registry};

/// Description of a command of the application: what operators can ask a running program to do, besides changes of
/// objects.
///
/// ```
/// use wirepath_pipeline::registry::{Argument, ArgumentKind, Command, CommandSpec};
/// use wirepath_pipeline::{Control, ControlPlane};
/// use serde_json::{Value, json};
///
/// static COMMANDS: &[&CommandSpec] = &[&CommandSpec {
///     name: "forget",
///     about: "Forgets what was seen of an address",
///     arguments: &[Argument::required("address", ArgumentKind::Text, "IPv4 address")],
/// }];
///
/// struct Application;
///
/// impl Control for Application {
///     fn commands(&mut self) -> Vec<&'static CommandSpec> {
///         COMMANDS.to_vec()
///     }
///
///     // wirepath command forget address=10.0.0.1
///     fn command(&mut self, command: &Command<'_>, _: &mut ControlPlane) -> Result<Value, String> {
///         match command.name {
///             "forget" => Ok(json!({ "forgotten": command.text("address")? })),
///             _ => Err(command.unknown()),
///         }
///     }
/// }
/// ```
#[derive(Debug)]
pub struct CommandSpec {
    /// Name: lower-case words joined by `_`.
    pub name: &'static str,
    /// Description in one line.
    pub about: &'static str,
    /// Arguments.
    pub arguments: &'static [Argument],
}

/// A command that an operator gives.
#[derive(Debug)]
pub struct Command<'a> {
    /// Name of the command.
    pub name: &'a str,
    /// Arguments by name.
    pub arguments: &'a Map<String, Value>,
    /// User and process that give the command. The control socket has logged them.
    pub origin: &'a str,
}

impl Command<'_> {
    /// Returns a text argument; `Ok(None)` if it is absent.
    ///
    /// # Errors
    /// If the argument is not a text.
    pub fn text(&self, name: &str) -> Result<Option<&str>, String> {
        text(self.arguments, name)
    }

    /// Returns a number argument, which may also be given as text; `Ok(None)` if it is absent.
    ///
    /// # Errors
    /// If the argument is not a whole number from 0 on.
    pub fn number(&self, name: &str) -> Result<Option<u64>, String> {
        number(self.arguments, name)
    }

    /// Returns an argument that is true or false, also as text; `Ok(None)` if it is absent.
    ///
    /// # Errors
    /// If the argument is neither.
    pub fn flag(&self, name: &str) -> Result<Option<bool>, String> {
        let Some(value) = self.arguments.get(name) else { return Ok(None) };
        let flag = value.as_bool().or_else(|| value.as_str()?.parse().ok());
        flag.map(Some).ok_or_else(|| format!("{name}: found {value}, expected true or false"))
    }

    /// The reason why a command without a [`CommandSpec`] is refused.
    pub fn unknown(&self) -> String {
        format!("this program has no command {:?}", self.name)
    }
}

impl CommandSpec {
    fn check(&self) -> Result<(), String> {
        let checked = check_name("command", self.name).and_then(|()| check_text("command", self.name, self.about));
        let arguments = self.arguments.iter();
        let arguments = arguments
            .map(|it| check_name("argument", it.name).and_then(|()| check_text("argument", it.name, it.about)));
        checked.and_then(|()| arguments.collect()).map_err(|error| error.to_string())
    }
}

impl Registry<'_> {
    /// Returns the commands of the application.
    ///
    /// # Errors
    /// If the name or the text of a command or of an argument is not valid, or two commands have one name. This is an
    /// error of the application.
    pub fn commands(&mut self) -> Result<Vec<&'static CommandSpec>, String> {
        let commands = self.control.commands();
        for (i, command) in commands.iter().enumerate() {
            command.check()?;
            if commands[..i].iter().any(|other| other.name == command.name) {
                return Err(format!("the application has two commands \"{}\"", command.name));
            }
        }
        Ok(commands)
    }

    /// Carries out a command and returns its result.
    ///
    /// # Errors
    /// If no command has this name, if its arguments are others, and if the application refuses.
    pub fn command(&mut self, command: &Command<'_>) -> Result<Value, String> {
        let commands = self.commands()?;
        let Some(known) = commands.iter().find(|known| known.name == command.name) else {
            let names: Vec<&str> = commands.iter().map(|known| known.name).collect();
            let hint = match wirepath_settings::nearest(command.name, &names) {
                Some(near) => format!("; did you mean \"{near}\"?"),
                None if names.is_empty() => String::new(),
                None => format!("; there are {}", names.join(", ")),
            };
            return Err(command.unknown() + &hint);
        };
        check_arguments(known.name, known.arguments, command.arguments)?;
        self.control.command(command, self.plane)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::registry::ArgumentKind;

    const fn spec(name: &'static str, about: &'static str, arguments: &'static [Argument]) -> CommandSpec {
        CommandSpec { name, about, arguments }
    }

    #[test]
    fn hostile_names_of_commands_are_refused() {
        assert_eq!(spec("forget_2", "text", &[]).check(), Ok(()));
        for name in ["", "two words", "x\u{1b}[2J", "x\"", "Upper"] {
            let error = spec(name, "text", &[]).check().unwrap_err();
            assert!(error.starts_with("command \"") && !error.contains('\u{1b}'), "{error}");
        }
        assert!(spec("x", "a\nb", &[]).check().unwrap_err().starts_with("command \"x\": its text"));
        const BAD: &[Argument] = &[Argument::required("a=b", ArgumentKind::Text, "text")];
        assert!(spec("x", "text", BAD).check().unwrap_err().starts_with("argument \"a=b\": a name has"));
    }

    #[test]
    fn arguments_have_types() {
        let arguments = json!({ "text": "a", "number": "7", "flag": "true", "other": false });
        let command = Command { name: "x\n", arguments: arguments.as_object().unwrap(), origin: "test" };
        assert_eq!((command.text("text"), command.text("none")), (Ok(Some("a")), Ok(None)));
        assert_eq!((command.number("number"), command.flag("flag")), (Ok(Some(7)), Ok(Some(true))));
        assert_eq!((command.flag("other"), command.flag("none")), (Ok(Some(false)), Ok(None)));
        assert_eq!(command.flag("text").unwrap_err(), "text: found \"a\", expected true or false");
        assert!(command.number("text").is_err() && command.text("other").is_err());
        assert_eq!(command.unknown(), "this program has no command \"x\\n\"");
    }
}
