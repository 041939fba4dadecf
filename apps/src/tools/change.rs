//! `wirepath add`, `set` and `remove`: changes of a running program.

use clap::Args;
use serde_json::{Map, Value, json};

use wirepath::cli::{Failure, print, print_json};
use wirepath::control_socket::SocketArgument;

/// Arguments of a change.
#[derive(Clone, Debug, Args)]
pub struct ChangeArguments {
    /// Kind of the object; without it, the possible objects and arguments are listed
    #[arg(value_name = "OBJECT")]
    object: Option<String>,

    /// Arguments of the object
    #[arg(value_name = "NAME=VALUE")]
    arguments: Vec<String>,

    #[command(flatten)]
    socket: SocketArgument,
}

pub(super) fn run(operation: &str, options: &ChangeArguments, json: bool) -> Result<(), Failure> {
    let mut client = options.socket.connect()?;
    let Some(object) = &options.object else {
        let objects = client.ask(&json!({ "request": "objects" }))?;
        return if json { print_json(&objects) } else { print(describe(&objects, operation)) };
    };
    let arguments = named_values(&options.arguments)?;
    let answer = client.ask(&json!({ "request": operation, "object": object, "arguments": arguments }))?;
    if json {
        return print_json(&answer);
    }
    if answer["differences"].is_array() {
        return print(super::reload::describe(&answer));
    }
    let results = answer.as_object().into_iter().flatten().filter(|(key, _)| *key != "ok");
    let text: String = results
        .map(|(key, value)| match value {
            Value::String(text) => format!("{key}: {text}\n"),
            other => format!("{key}: {other}\n"),
        })
        .collect();
    print(if text.is_empty() { "applied\n".to_owned() } else { text })
}

/// Reads arguments of the form NAME=VALUE.
pub(super) fn named_values(given: &[String]) -> Result<Map<String, Value>, Failure> {
    let mut arguments = Map::new();
    for argument in given {
        let Some((name, value)) = argument.split_once('=') else {
            return Err(Failure::usage(format!("\"{argument}\": expected NAME=VALUE")));
        };
        if arguments.insert(name.to_owned(), value.into()).is_some() {
            return Err(Failure::usage(format!("the argument \"{name}\" is given twice")));
        }
    }
    Ok(arguments)
}

/// Describes arguments, one in a line.
pub(super) fn arguments_text(arguments: &Value) -> String {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let line = |argument: &Value| {
        let optional = if argument["required"] == true { "" } else { " (optional)" };
        let (name, kind) = (text(&argument["name"]), text(&argument["kind"]));
        format!("    {name}=<{kind}> {}{optional}\n", text(&argument["about"]))
    };
    arguments.as_array().into_iter().flatten().map(line).collect()
}

/// Describes the objects that have an operation.
fn describe(objects: &Value, operation: &str) -> String {
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let mut described = String::new();
    for object in list(&objects["objects"]) {
        for possible in list(&object["operations"]).iter().filter(|it| it["name"] == operation) {
            described += &format!("{operation} {}: {}\n", text(&object["name"]), text(&object["about"]));
            described += &arguments_text(&possible["arguments"]);
        }
    }
    if described.is_empty() {
        described = format!("this program has nothing that \"{operation}\" can be applied to while it runs\n");
    }
    described
}

/// Declares the subcommand of one operation.
macro_rules! operation {
    ($module:ident, $name:literal, $about:literal, $example:literal) => {
        pub mod $module {
            #![doc = concat!("`wirepath ", $name, "`.")]
            use super::ChangeArguments;
            use wirepath::cli::Failure;

            #[doc = $about]
            ///
            /// Without OBJECT, the possible objects and their arguments are listed. A change is made whole or not at
            /// all. The program says who may change it (key `change` of its table `[control]`).
            #[derive(Clone, Debug, clap::Args)]
            #[command(after_help = $example)]
            pub struct Options {
                #[command(flatten)]
                arguments: ChangeArguments,
            }

            /// Runs the subcommand.
            ///
            /// # Errors
            /// If the program does not answer or refuses the change.
            pub fn run(options: &Options, json: bool) -> Result<(), Failure> {
                super::run($name, &options.arguments, json)
            }
        }
    };
}

operation!(
    add,
    "add",
    "Adds an object to a running program",
    "Examples:\n  wirepath add rule 'rule=ingress: port id wan / udp dst 53 => drop'\n  \
     wirepath add segment name=blue vni=42 remotes=10.9.0.2,10.9.0.3 ports=lan,lan2.100\n  \
     wirepath add remote segment=blue address=10.9.0.4\n  \
     wirepath add port name=lan3 device=eth3 driver=af_packet"
);
operation!(
    set,
    "set",
    "Changes an object of a running program",
    "Examples:\n  wirepath set                              # lists the objects\n  \
     wirepath set segment name=blue mtu=1400"
);
operation!(remove, "remove", "Removes an object from a running program", "Example:\n  wirepath remove rule id=7");
