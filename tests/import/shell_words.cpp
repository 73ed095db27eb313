// Words and variables of shell scripts: what is filled in, what stays open, and where each byte comes from.
#include <doctest/doctest.h>

#include "base/error.hpp"
#include "import/shell_words.hpp"

using namespace capstan;
using namespace capstan::importer;

namespace {

// The last command, its words in brackets; a word that is not known has its reason behind it.
std::string last(std::string_view text) {
  const ShellScript script = read_shell(text);
  std::string result;
  if (script.commands.empty()) return "nothing";
  for (const ShellWord& word : script.commands.back()) {
    CHECK(word.text.size() == word.at.size());
    result += "[" + word.text + "]" + (word.open.empty() ? "" : "?");
  }
  return result;
}

}  // namespace

TEST_CASE("words: quotes, continued lines and comments") {
  CHECK(last("run a 'b c' \"d e\" f\\ g") == "[run][a][b c][d e][f g]");
  CHECK(last("run --x \\\n  1 # a comment with 'quotes\n") == "[run][--x][1]");
  CHECK(last("run a#b '#c' \"\" ''") == "[run][a#b][#c][][]");
  CHECK(last("run \"a\\\"b\\\\c\\n\" 'a\\b'") == "[run][a\"b\\c\\n][a\\b]");
  CHECK(last("first; second && third | fourth") == "[fourth]");
  CHECK(last("run \"two\\\n words\"") == "[run][two words]");
  CHECK(last("") == "nothing");
  CHECK(last("A=1\nexport B=2") == "nothing");
}

TEST_CASE("variables: texts, lists and defaults") {
  CHECK(last("A=7; run $A ${A} x${A}y '$A' \"$A\"") == "[run][7][7][x7y][$A][7]");
  CHECK(last("A=\"--x 1\n --y 2\"\nrun $A \"$A\"") == "[run][--x][1][--y][2][--x 1\n --y 2]");
  CHECK(last("A=(--x 1 # why\n '--y z')\nrun ${A[@]}") == "[run][--x][1][--y][z]");
  CHECK(last("A=(--x '1 2')\nrun \"${A[@]}\" \"${A[*]}\" $A") == "[run][--x][1 2][--x 1 2][--x]");
  CHECK(last("A=(a); A+=(b); run \"${A[@]}\"") == "[run][a][b]");
  CHECK(last("A=a; A+=b; run $A") == "[run][ab]");
  CHECK(last("run ${A:-5} ${A:-$B} ${A-x}") == "[run][5][$B]?[x]");
  CHECK(last("A=${1:-deep}; run $A $1") == "[run][deep][$1]?");
  CHECK(last("A=''; run ${A:-5} ${A-6}") == "[run][5]");
  CHECK(last("A=2; run ${A:-5} ${B:-${A}}") == "[run][2][2]");
  CHECK(last("declare -a A=(1 2)\nrun ${A[@]}") == "[run][1][2]");
  CHECK(last("A=1\nA=2\nrun $A") == "[run][2]");
}

TEST_CASE("what only a shell could know stays as written and is marked") {
  CHECK(last("run $HOME $1 $(hostname -i) `date` $((1 + 2)) ${A##*/} ok") ==
        "[run][$HOME]?[$1]?[$(hostname -i)]?[`date`]?[$((1 + 2))]?[${A##*/}]?[ok]");
  // One open part does not make the rest of a variable open.
  CHECK(last("A=\"--nodes $N --lr 1e-4\"; run $A") == "[run][--nodes][$N]?[--lr][1e-4]");
  CHECK(last("N=$((2*4))\nrun --n $N --m 1") == "[run][--n][$((2*4))]?[--m][1]");
}

TEST_CASE("places lead to the assignment that the words were written in") {
  const std::string text = "A=\"--lr 3\"\nrun $A";
  const ShellScript script = read_shell(text);
  REQUIRE(script.commands.size() == 1);
  REQUIRE(script.commands[0].size() == 3);
  CHECK(script.commands[0][1].begin == text.find("--lr"));
  CHECK(script.commands[0][2].begin == text.find('3'));
}

TEST_CASE("here documents are no commands, branches are told") {
  CHECK(last("cat <<EOF > x\nit's --lr 1\nEOF\nrun b") == "[run][b]");
  CHECK(last("cat <<-'EOF'\n\tdon't\n\tEOF\nrun c") == "[run][c]");
  CHECK(read_shell("if [ $A ]; then B=1; fi\nrun").branches.size() == 1);
  CHECK(read_shell("run a b").branches.empty());
}

TEST_CASE("damaged and hostile scripts are errors, not loops") {
  for (const char* text :
       {"run 'a", "run \"a", "run $(a", "run ${a", "A=(a", "run `a", "run ${A:-b", "run \"${A:-\"b"})
    CHECK_THROWS_AS(read_shell(text), Error);
  std::string bomb = "A=0123456789\n";
  for (int i = 0; i < 40; ++i) bomb += "A=$A$A\n";
  CHECK_THROWS_AS(read_shell(bomb), Error);
  std::string nested = "run ";
  for (int i = 0; i < 5000; ++i) nested += "${A:-";
  CHECK_THROWS_AS(read_shell(nested), Error);
  CHECK(last("run a\\") == "[run][a]");
  CHECK(last("run $") == "[run][$]");
}
