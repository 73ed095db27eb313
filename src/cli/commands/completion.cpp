// capstan completion
#include "base/error.hpp"
#include "cli/commands/commands.hpp"
#include "cli/terminal.hpp"

namespace capstan::cli {

namespace {

// Bash splits words at `=`, `:` and `@` (COMP_WORDBREAKS): the script joins these parts again, and removes
// from each answer the prefix that bash keeps.
constexpr std::string_view kBash = R"script(# bash completion of capstan: source <(capstan completion bash)
_capstan() {
  local rest=${COMP_LINE:0:COMP_POINT} i value doc breaks kept=
  local -a words=() values=() docs=()
  for ((i = 0; i <= COMP_CWORD; i++)); do
    if ((i == 0)) || [[ $rest == [[:blank:]]* ]]; then
      rest=${rest#"${rest%%[![:blank:]]*}"}
      words+=('')
    fi
    value=${COMP_WORDS[i]}
    ((i < COMP_CWORD)) || value=$rest
    words[${#words[@]}-1]+=$value
    rest=${rest#"$value"}
  done
  local word=${words[${#words[@]}-1]}
  for ((i = 0; i < ${#words[@]}; i++)); do
    [[ ${words[i]} != [\'\"]* ]] || words[i]=${words[i]:1}
    [[ ${words[i]} != *[\'\"] ]] || ((i + 1 == ${#words[@]})) || words[i]=${words[i]%?}
    words[i]=${words[i]//\\/}
  done
  breaks=${COMP_WORDBREAKS//[^=:@]/}
  [[ $word == [\'\"]* || -z $breaks || $word != *[$breaks]* ]] || kept=${word%"${word##*[$breaks]}"}
  while IFS=$'\t' read -r value doc; do
    values+=("$value")
    docs+=("$doc")
  done < <("${words[0]/#\~\//$HOME/}" __complete "${words[@]:1}" 2>/dev/null)
  COMPREPLY=()
  for ((i = 0; i < ${#values[@]}; i++)); do
    value=${values[i]}
    [[ $word == [\'\"]* || $value != *[^][A-Za-z0-9_.,:=@%/~+{}-]* ]] || printf -v value %q "$value"
    value=${value#"$kept"}
    # Only a list of several is read; inserted words have no description.
    if [[ $COMP_TYPE == 63 && ${#values[@]} -gt 1 && -n ${docs[i]} ]]; then
      printf -v value '%-28s  %s' "$value" "${docs[i]}"
      value=${value:0:$((${COLUMNS:-80} - 3))}
    fi
    COMPREPLY+=("$value")
  done
  compopt -o nosort 2>/dev/null
  [[ ${#values[@]} -ne 1 || ${values[0]} != *[=./] ]] || compopt -o nospace 2>/dev/null
  return 0
}
complete -F _capstan capstan
)script";

constexpr std::string_view kZsh = R"script(#compdef capstan
# zsh completion of capstan: source <(capstan completion zsh), or this text as the file _capstan in a directory of $fpath
_capstan() {
  local line value text
  local -a ended open
  for line in "${(@f)$("${(Q)words[1]/#\~\//$HOME/}" __complete "${(@Q)words[2,CURRENT-1]}" "${(Q)PREFIX}" 2>/dev/null)}"; do
    value=${line%%$'\t'*}
    [[ -n $value ]] || continue
    text=${value//:/\\:}
    [[ $line != *$'\t'* ]] || text+=:${line#*$'\t'}
    if [[ $value == *[=./] ]]; then open+=("$text"); else ended+=("$text"); fi
  done
  _describe -V 'capstan' open -S '' -- ended
}
if [[ $funcstack[1] == _capstan ]]; then _capstan "$@"; else compdef _capstan capstan; fi
)script";

constexpr std::string_view kFish = R"script(# fish completion of capstan: capstan completion fish | source
function __capstan_complete
  set -l words (commandline -opc)
  $words[1] __complete $words[2..-1] (commandline -ct) 2>/dev/null
end
complete -c capstan -f -k -a '(__capstan_complete)'
)script";

int run_completion(Context& context) {
  const std::string& shell = context.args.word(0, "SHELL");
  if (shell == "bash")
    put(kBash);
  else if (shell == "zsh")
    put(kZsh);
  else if (shell == "fish")
    put(kFish);
  else
    fail(ErrorCode::usage, "there is no completion for `" + shell + "`",
         choices_help(shell, {"bash", "zsh", "fish"}));
  return 0;
}

}  // namespace

const Command kCompletion = {
    .name = "completion",
    .purpose = "print a shell script that completes commands, flags, fields and values",
    .usage = "SHELL",
    .examples = {{"completion bash > ~/.local/share/bash-completion/completions/capstan", "for new shells"},
                 {"completion zsh > ~/.zfunc/_capstan", "a directory of $fpath"},
                 {"completion fish > ~/.config/fish/completions/capstan.fish", ""}},
    .details =
        "SHELL is bash, zsh or fish. In a running bash: source <(capstan completion bash). The script asks "
        "this\n"
        "program for the words that can follow: commands, flags, recipes, fields by section, their choices,\n"
        "presets, files, runs and checkpoints, each with a description.\n",
    .max_words = 1,
    .run = run_completion,
};

}  // namespace capstan::cli
